"""The functions of the public API."""

from __future__ import annotations

import os
import sys
from contextlib import ContextDecorator

from torchotel._types import UNSET, Unset

TYPE_CHECKING = False  # typing takes half of what `import torchotel` does
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Literal

    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider
    from prometheus_client import CollectorRegistry
    from torch import Tensor
    from torch.nn import Module

    from torchotel._handle import Handle
    from torchotel._session import Session


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
) -> Handle:
    """Trace every training step of this process, from its next event on.

    An argument that is left out is read from its variable, and only then takes its default. A second call returns
    the same handle and warns where its arguments differ.

    Args:
        model: Its modules get their full names from the first call on.
        service_name: OTEL_SERVICE_NAME; the script's name.
        endpoint: OTEL_EXPORTER_OTLP_ENDPOINT, a base URL; `http://localhost:4318`, with gRPC `http://localhost:4317`.
        protocol: OTEL_EXPORTER_OTLP_PROTOCOL, "http/protobuf" or "grpc"; `http/protobuf`.
        headers: OTEL_EXPORTER_OTLP_HEADERS; none.
        compression: OTEL_EXPORTER_OTLP_COMPRESSION; `gzip`.
        traces_exporter: OTEL_TRACES_EXPORTER, "otlp", "console" or "none"; `otlp`.
        metrics_exporter: OTEL_METRICS_EXPORTER, "none", "prometheus", "otlp" or both, comma-separated; `prometheus`.
        tracer_provider: Spans are replayed through it; the global one where one is set, else sent by ourselves.
        meter_provider: Metrics are also instruments of it; none.
        set_global_provider: TORCHOTEL_SET_GLOBAL_PROVIDER, whether a TracerProvider to the same endpoint is set for
            your own spans where there is none; False.
        prometheus_port: OTEL_EXPORTER_PROMETHEUS_PORT, the local rank is added, 0: any free one, None: no server; 9464.
        prometheus_host: OTEL_EXPORTER_PROMETHEUS_HOST; `127.0.0.1`.
        prometheus_registry: Metrics are collected there, and no server is started; a server with one of our own.
        discovery_dir: TORCHOTEL_DISCOVERY_DIR, folder of a Prometheus file_sd target, there while this runs; that of
            `torchotel stack` where one was up, else None.
        record: TORCHOTEL_RECORD, folder of the run file, a free name beside it if it holds a run; None: no run file.
        detail: TORCHOTEL_DETAIL; "auto": the first ten steps, then as often as the budget allows, "all", n: every
            n-th, "off": steps and phases only.
        overhead_budget: TORCHOTEL_OVERHEAD_BUDGET, share of step time that detail may cost with detail="auto"; 0.01.
        include: TORCHOTEL_INCLUDE, patterns of the module paths that get spans (`*` crosses dots); all.
        exclude: TORCHOTEL_EXCLUDE, patterns of those that get none; none.
        max_depth: TORCHOTEL_MAX_DEPTH, deepest level of modules that get spans, the root is 0; no limit.
        max_spans: TORCHOTEL_MAX_SPANS, of one trace, deeper modules fold into their parents; 2000.
        module_histograms: TORCHOTEL_MODULE_HISTOGRAMS, whether `torch.module.duration` is kept as a histogram; False.
        gradient_norms: TORCHOTEL_GRADIENT_NORMS, "auto": on detailed steps, True: on every one, n: every n-th, False:
            never; but for False also on 8 steps after a loss that is not finite; `auto`.
        shapes: TORCHOTEL_SHAPES, whether shapes and dtypes are recorded; True.
        exception_text: TORCHOTEL_EXCEPTION_TEXT, how much of an exception's text is recorded: "type", "first_line" or
            "full". The text can hold values of tensors; `first_line`.
        run_id: TORCHOTEL_RUN_ID; the launcher's job id, else one that the ranks of a launch agree on, else random.

    Raises:
        ConfigError: A value is bad; nothing was installed.
    """
    given = {name: value for name, value in locals().items() if name != "model" and value is not UNSET}
    from torchotel._utils.gc_pause import uncollected  # noqa: PLC0415  # importing torchotel must stay free

    with uncollected():  # modules and classes come by the hundred, and stay
        zero_code = sys.modules.get("torchotel._auto_instrument")
        if zero_code is not None or "torch" not in sys.modules:
            from torchotel.config.config import Config  # noqa: PLC0415  # importing torchotel must stay free

            Config.read(given, os.environ)  # a bad value is told before torch is loaded, or zero code starts
        from torchotel import _handle  # noqa: PLC0415  # brings in torch, after settings are checked

        if zero_code is not None:  # it may be waiting for torch, and its settings hold where none are given here
            zero_code.start_now()
        return _handle.start(given, model)


def uninstrument() -> None:
    """Shut down what `instrument()` started, if it runs."""
    zero_code = sys.modules.get("torchotel._auto_instrument")
    if zero_code is not None:
        zero_code.call_off()
    handle = sys.modules.get("torchotel._handle")
    if handle is not None:
        handle.stop()


def log(**values: object) -> None:
    """Log values of the current training step, else of the last one.

    A tensor of one element is read a step later, without a synchronisation. `loss`, `lr`, `samples`, `tokens` and
    `epoch` are known; any other name becomes the step's attribute `torch.log.<name>` and the gauge `torch_log{name}`.
    `samples` and `tokens` add up within a step. What can't be taken is left out with a warning; nothing is raised.

    Args:
        **values: Numbers, tensors of one element; strings too under names that are not known.
    """
    session = _running()
    if session is not None:
        session.log(values)


def name(model: Module, name: str) -> None:
    """Name a model: its spans have the name as `torch.model`, and so have its metrics.

    Without this a model has the name of its class. Call it after `instrument()`, before or after the model's first
    call; spans and metrics of earlier calls keep the old name. A second model of the same name gets `-2`, as with
    classes. Names are cut at 1,024 characters. If `model` is a part of another module or no module, or `name` is empty
    or no string, a warning is logged and nothing is named. Raises nothing.

    Args:
        model: The whole model, with or without a wrapper such as DistributedDataParallel.
        name: What to call it: `generator`.
    """
    session = _running()
    if session is not None:
        session.name(model, name)


def watch(tensor: Tensor, name: str) -> None:
    """Report the gradient of an intermediate tensor, whenever a backward computes it.

    It becomes an event of the backward's span, with shape and L2 norm, and the gauge `torch_tensor_gradient_norm`.
    To be called in each step, where the tensor is made; its gradient is left as it is, and the tensor is not kept.

    Args:
        tensor: One that requires grad.
        name: What to call it: `attention.probs`.
    """
    session = _running()
    if session is not None:
        session.watch(tensor, name)


class step(ContextDecorator):  # noqa: N801  # reads as a function: `with torchotel.step():`
    """Mark the bounds of a training step: `with torchotel.step(epoch=3): ...`, or `@torchotel.step()` on a function.

    Whatever runs inside is one step, which takes in the fetch of its batch just before it. A block inside another is
    part of it. An exception that leaves the block is noted on the step.

    Args:
        **values: Logged of the step, as by `log`.
    """

    def __init__(self, **values: object) -> None:
        self._values = values
        self._sessions: list[Session | None] = []  # of blocks that are open: one object may stand for several

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
    handle = sys.modules.get("torchotel._handle")  # importing it would bring in torch
    # While Dynamo compiles we are not there, or a graph would break, and `fullgraph=True` would raise.
    return None if handle is None or handle.is_compiling() else handle.running()
