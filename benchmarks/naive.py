"""The instrumentation that one writes first: a live SDK span for each call, hooks as the manual has them."""

from __future__ import annotations

import warnings
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, set_span_in_context
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)

from benchmarks.models import Workload


class NaiveInstrument:
    """Make spans of every forward and backward call while they run.

    Args:
        workload: What is traced.
        endpoint: Full URL that traces are posted to.
    """

    def __init__(self, workload: Workload, endpoint: str) -> None:
        # The first layers' inputs need no gradient, and torch says so at every step.
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        self.spans = 0
        self._paths = {module: path or "root" for path, module in workload.model.named_modules()}
        self._provider = TracerProvider()
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("naive")
        self._forward: list[Span] = []
        self._backward: dict[nn.Module, Span] = {}
        self._handles = [
            register_module_forward_pre_hook(self._forward_begins),
            register_module_forward_hook(self._forward_ends),
            register_module_full_backward_pre_hook(self._backward_begins),
            register_module_full_backward_hook(self._backward_ends),
        ]

    def flush(self) -> None:
        """Export all spans that the processor still holds."""
        self._provider.force_flush()

    def remove(self) -> None:
        """Take the hooks out and end the processor's thread."""
        for handle in self._handles:
            handle.remove()
        self._provider.shutdown()

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
                "torch.module.parameters": sum(p.numel() for p in module.parameters(recurse=False)),
            },
        )

    def _forward_begins(self, module: nn.Module, args: Any) -> None:
        span = self._start("forward", module, self._forward[-1] if self._forward else None)
        span.set_attribute("torch.input.shapes", _shapes(args))
        self._forward.append(span)

    def _forward_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        span = self._forward.pop()
        span.set_attribute("torch.output.shapes", _shapes(output))
        span.end()

    def _backward_begins(self, module: nn.Module, grad_output: Any) -> None:
        span = self._backward[module] = self._start("backward", module, None)
        span.set_attribute("torch.grad_output.shapes", _shapes(grad_output))

    def _backward_ends(self, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        span = self._backward.pop(module)
        span.set_attribute("torch.grad_input.shapes", _shapes(grad_input))
        span.end()


def _shapes(value: Any) -> list[str]:
    tensors = value if isinstance(value, tuple) else (value,)
    return ["x".join(map(str, tensor.shape)) for tensor in tensors if isinstance(tensor, Tensor)]
