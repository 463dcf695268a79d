"""A naive instrumentation: a live SDK span for each call, and hooks on its tensors for the backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, set_span_in_context
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle


def sdk_provider(endpoint: str) -> TracerProvider:
    """Return a provider as in OpenTelemetry's documentation, with the default processor and compressed requests.

    Args:
        endpoint: Full URL that traces are posted to.
    """
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, compression=Compression.Gzip)))
    return provider


class NaiveInstrument:
    """Make spans of every forward and backward call between `install` and `remove`.

    A backward span lasts from the gradient of the output to that of the input. If no input needs a gradient, as in the
    first layer, it ends when the next step begins.

    Args:
        model: The traced model.
        provider: Provider of the spans.
    """

    def __init__(self, model: nn.Module, provider: TracerProvider) -> None:
        self.spans = 0
        self._model = model
        self._paths = {module: path or "root" for path, module in model.named_modules()}
        self._sizes = {module: sum(p.numel() for p in module.parameters(recurse=False)) for module in self._paths}
        self._tracer = provider.get_tracer("naive")
        self._stack: list[Span] = []
        self._backward: dict[nn.Module, Span] = {}
        self._handles: list[RemovableHandle] = []

    def install(self) -> None:
        """Install the hooks."""
        self._handles = [register_module_forward_pre_hook(self._before), register_module_forward_hook(self._after)]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._end_left()

    def _start(self, direction: str, module: nn.Module, parent: Span | None) -> Span:
        self.spans += 1
        path = self._paths.get(module, "?")
        return self._tracer.start_span(
            f"{direction} {path}",
            context=set_span_in_context(parent) if parent is not None else None,
            attributes={
                "torch.module.path": path,
                "torch.module.type": type(module).__name__,
                "torch.direction": direction,
            },
        )

    def _before(self, module: nn.Module, args: Any) -> None:
        if module is self._model:
            self._end_left()
        span = self._start("forward", module, self._stack[-1] if self._stack else None)
        span.set_attributes(
            {"torch.module.parameters": self._sizes.get(module, 0), "torch.input.shapes": _shapes(args)}
        )
        self._stack.append(span)
        for tensor in _tensors(args):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._backward_ends(module, gradient))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        span = self._stack.pop()
        span.set_attribute("torch.output.shapes", _shapes(output))
        span.end()
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._backward_begins(module, gradient, span))

    def _backward_begins(self, module: nn.Module, gradient: Tensor, forward: Span) -> None:
        span = self._backward[module] = self._start("backward", module, forward)
        span.set_attribute("torch.grad_output.shapes", _shapes(gradient))

    def _backward_ends(self, module: nn.Module, gradient: Tensor) -> None:
        span = self._backward.pop(module, None)
        if span is not None:
            span.set_attribute("torch.grad_input.shapes", _shapes(gradient))
            span.end()

    def _end_left(self) -> None:
        for span in self._backward.values():
            span.end()
        self._backward.clear()


def _tensors(value: Any) -> Iterator[Tensor]:
    values = value if isinstance(value, tuple) else (value,)
    return (one for one in values if isinstance(one, Tensor))


def _shapes(value: Any) -> list[str]:
    return ["x".join(map(str, tensor.shape)) for tensor in _tensors(value)]
