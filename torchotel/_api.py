"""The functions of the public API."""

from __future__ import annotations

import os
import sys
from contextlib import ContextDecorator

from torchotel._lifecycle import LIFECYCLE, WAITING_FOR_TORCH
from torchotel._types import UNSET, Unset

TYPE_CHECKING = False  # importing typing takes half of the time that `import torchotel` may take
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Any, Literal, TypeVar

    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider
    from prometheus_client import CollectorRegistry
    from torch import Tensor
    from torch.nn import Module

    from torchotel._handle import Handle
    from torchotel._session import Session

    Function = TypeVar("Function", bound=Callable[..., Any])

_RUNS_LATER = 0x20 | 0x80 | 0x200
"""`inspect.CO_GENERATOR`, `CO_COROUTINE` and `CO_ASYNC_GENERATOR`: a call of such a function does not run its body."""
_NOT_DECORATED = (
    "@torchotel.step() does nothing on the generator or coroutine function %s: its call returns before its body runs, "
    "so its steps are found as without the decorator. Use `with torchotel.step():` inside the function"
)


def instrument(
    model: Module | None = None,
    *,
    service_name: str | Unset | None = UNSET,
    endpoint: str | Unset = UNSET,
    protocol: Literal["http/protobuf", "grpc"] | Unset = UNSET,
    headers: Mapping[str, str] | Unset = UNSET,
    compression: Literal["gzip", "none"] | Unset = UNSET,
    traces_exporter: Literal["otlp", "console", "none"] | Unset = UNSET,
    metrics_exporter: str | Sequence[str] | Unset = UNSET,
    tracer_provider: TracerProvider | Unset | None = UNSET,
    meter_provider: MeterProvider | Unset | None = UNSET,
    set_global_provider: bool | Unset = UNSET,
    prometheus_port: int | Unset | None = UNSET,
    prometheus_host: str | Unset = UNSET,
    prometheus_registry: CollectorRegistry | Unset | None = UNSET,
    discovery_dir: str | Path | Unset | None = UNSET,
    record: str | Path | Unset | None = UNSET,
    detail: Literal["auto", "all", "off"] | int | Unset = UNSET,
    overhead_budget: float | Unset = UNSET,
    include: str | Sequence[str] | Unset | None = UNSET,
    exclude: str | Sequence[str] | Unset | None = UNSET,
    max_depth: int | Unset | None = UNSET,
    max_spans: int | Unset | None = UNSET,
    module_histograms: bool | Unset = UNSET,
    gradient_norms: Literal["auto"] | bool | int | Unset = UNSET,
    shapes: bool | Unset = UNSET,
    exception_text: Literal["type", "first_line", "full"] | Unset = UNSET,
    run_id: str | Unset | None = UNSET,
    worker: Literal["auto", "process", "thread"] | Unset = UNSET,
    stall_timeout_s: float | Unset = UNSET,
    channel_bytes: int | Unset = UNSET,
) -> Handle:
    """Trace every training step of this process, from its next event on.

    If an argument is left out, its variable is read; if the variable is not set, the default applies. Below, each entry
    begins with the variable and ends with the default. A second call returns the same handle, and logs a warning if its
    arguments differ.

    Args:
        model: Its modules get their full names from the first call on.
        service_name: OTEL_SERVICE_NAME; the script's name.
        endpoint: OTEL_EXPORTER_OTLP_ENDPOINT, a base URL; `http://localhost:4318`, with gRPC `http://localhost:4317`.
        protocol: OTEL_EXPORTER_OTLP_PROTOCOL, "http/protobuf" or "grpc"; `http/protobuf`.
        headers: OTEL_EXPORTER_OTLP_HEADERS; none.
        compression: OTEL_EXPORTER_OTLP_COMPRESSION; `gzip`.
        traces_exporter: OTEL_TRACES_EXPORTER, "otlp", "console" or "none"; `otlp`.
        metrics_exporter: OTEL_METRICS_EXPORTER, "none", "prometheus", "otlp" or both, comma-separated; `prometheus`.
        tracer_provider: Spans are replayed through it; the global one if one is set, else torchotel exports its spans.
        meter_provider: Metrics are also instruments of it; none.
        set_global_provider: TORCHOTEL_SET_GLOBAL_PROVIDER, whether a TracerProvider to the same endpoint is set for
            the program's own spans if there is none; False.
        prometheus_port: OTEL_EXPORTER_PROMETHEUS_PORT, the local rank is added, 0: any free one, None: no server; 9464.
        prometheus_host: OTEL_EXPORTER_PROMETHEUS_HOST; `127.0.0.1`.
        prometheus_registry: Metrics are collected there, and no server is started; torchotel's registry and a server.
        discovery_dir: TORCHOTEL_DISCOVERY_DIR, folder of a Prometheus file_sd target, there while this runs; the folder
            of `torchotel stack` if one was up, else None.
        record: TORCHOTEL_RECORD, folder of the run file, a free name beside it if it holds a run; None: no run file.
        detail: TORCHOTEL_DETAIL, "auto": the first ten steps, then as often as the budget allows, "all", n: every
            n-th, "off": steps and phases only; `auto`.
        overhead_budget: TORCHOTEL_OVERHEAD_BUDGET, share of step time that detail may cost with detail="auto"; 0.01.
        include: TORCHOTEL_INCLUDE, patterns of the module paths that get spans (`*` crosses dots); all.
        exclude: TORCHOTEL_EXCLUDE, patterns of the module paths that get no spans; none.
        max_depth: TORCHOTEL_MAX_DEPTH, deepest level of modules that get spans, the root is 0; no limit.
        max_spans: TORCHOTEL_MAX_SPANS, spans of a trace; beyond it, deeper modules fold into their parents; 2000.
        module_histograms: TORCHOTEL_MODULE_HISTOGRAMS, whether `torch.module.duration` is kept as a histogram; False.
        gradient_norms: TORCHOTEL_GRADIENT_NORMS, "auto": on detailed steps, True: on every step, n: on every n-th,
            False: never. Except with False, also on 8 steps after a loss that is not finite, at most once in
            64 steps; `auto`.
        shapes: TORCHOTEL_SHAPES, whether shapes and dtypes are recorded; True.
        exception_text: TORCHOTEL_EXCEPTION_TEXT, how much of an exception's text is recorded: "type", "first_line" or
            "full". The text can hold values of tensors; `first_line`.
        run_id: TORCHOTEL_RUN_ID; the launcher's job id, else an id that the ranks of a launch agree on, else random.
        worker: TORCHOTEL_WORKER, where spans are built and exported: "process", a companion process without torch
            (Linux), "thread", or "auto": the companion, unless an exporter needs this process; `auto`.
        stall_timeout_s: TORCHOTEL_STALL_TIMEOUT_S, shortest time in a phase without an event that counts as a stall;
            the limit is ten times the 95th percentile of the steps if that is longer. Only with a companion; 60.0.
        channel_bytes: TORCHOTEL_CHANNEL_BYTES, shared memory for records that wait for the companion, 64 KiB to
            1 GiB; a record that does not fit is dropped and counted; 16777216.

    Raises:
        ConfigError: A value is bad. Nothing is installed.
    """
    explicit = {name: value for name, value in locals().items() if name != "model" and value is not UNSET}
    if LIFECYCLE.state == WAITING_FOR_TORCH or "torch" not in sys.modules:
        from torchotel.config.config import Config  # noqa: PLC0415  # `import torchotel` must stay below 10 ms

        Config.read(explicit, os.environ)  # raises for a bad value before torch is imported or zero code starts
    LIFECYCLE.start_deferred()  # zero code's settings apply to all arguments that this call leaves out
    return start_handle(explicit, model)


def start_handle(
    explicit: Mapping[str, object], model: Module | None, *, zero_code: bool = False, defer_start: bool = False
) -> Handle:
    """Import torch and call `_handle.start`."""
    from torchotel import _handle  # noqa: PLC0415  # imports torch

    return _handle.start(explicit, model, zero_code=zero_code, defer_start=defer_start)


def uninstrument() -> None:
    """Shut down what `instrument()` started; without a handle, do nothing."""
    LIFECYCLE.stop()


def log(**values: object) -> None:
    """Log values of the current training step, or of the last step if none is current.

    A tensor of one element is read a step later, without a synchronisation. `loss`, `lr`, `samples`, `tokens` and
    `epoch` are known; any other name becomes the step's attribute `torch.log.<name>` and the gauge `torch_log{name}`.
    `samples` and `tokens` add up within a step. A bad value is ignored with a warning; nothing is raised.

    Args:
        **values: Numbers and tensors of one element; strings, too, except for the known names.
    """
    session = _running()
    if session is not None:
        session.log(values)


def name(model: Module, name: str) -> None:
    """Name a model: its spans and its metrics have the name as `torch.model`.

    By default, a model has the name of its class. Call `name` after `instrument()`, before or after the model's first
    call; spans and metrics of earlier calls keep the old name. A second model of the same name gets `-2`, as with
    classes. Names are cut at 1,024 characters. If `model` is a part of another module or no module, or `name` is empty
    or no string, a warning is logged and nothing is named. Raises nothing.

    Args:
        model: The whole model, with or without a wrapper such as DistributedDataParallel.
        name: The new name, such as `generator`.
    """
    session = _running()
    if session is not None:
        session.name(model, name)


def watch(tensor: Tensor, name: str) -> None:
    """Record the gradient of an intermediate tensor whenever a backward computes it.

    The gradient becomes an event of the span `torch.backward`, with shape and L2 norm, and the gauge
    `torch_tensor_gradient_norm`. Call this in each step, after the tensor is computed. torchotel keeps no reference to
    the tensor and does not change its gradient.

    Args:
        tensor: A tensor that requires grad.
        name: The name of the tensor, such as `attention.probs`.
    """
    session = _running()
    if session is not None:
        session.watch(tensor, name)


class step(ContextDecorator):  # noqa: N801  # reads as a function: `with torchotel.step():`
    """Mark the bounds of a training step: `with torchotel.step(epoch=3): ...`, or `@torchotel.step()` on a function.

    The block is one step, together with the fetch of its batch just before the block. A block inside
    a block is part of the outer step. An exception that leaves the block is recorded on the step. The decorator returns
    a generator or coroutine function unchanged, with a warning: use the block inside such a function.

    Args:
        **values: Values of the step, as `log` takes them.
    """

    def __init__(self, **values: object) -> None:
        self._values = values
        self._sessions: list[Session | None] = []  # one for each open block: a decorated function may call itself

    def __call__(self, function: Function) -> Function:
        """Return a function that is one step at each call."""
        if getattr(getattr(function, "__code__", None), "co_flags", 0) & _RUNS_LATER:
            from torchotel._utils.faults import warn_once  # noqa: PLC0415  # `import torchotel` must stay below 10 ms

            warn_once(_NOT_DECORATED, getattr(function, "__qualname__", function))
            return function
        return super().__call__(function)

    def __enter__(self) -> None:
        session = _running()
        self._sessions.append(session)
        if session is not None:
            session.step_begins()
            session.log(self._values)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        session = self._sessions.pop()
        if session is not None:
            session.step_ends(error)


def _running() -> Session | None:
    # Dynamo traces this function, and is_compiling() is True then. A call of the session would break the graph.
    return None if LIFECYCLE.is_compiling() else LIFECYCLE.session
