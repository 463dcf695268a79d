"""Errors of torchotel's own, put into one of its functions after the other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

HOOKS = (
    # forward
    "capture.module_calls.ModuleCallRecorder.open",
    "capture.module_calls.ModuleCallRecorder.close_interrupted",
    "capture.module_calls.ModuleCallRecorder.add",
    "capture.module_calls.ModuleCallRecorder.add_failed",
    "capture.module_calls.ModuleCallRecorder._state_of",
    "capture.root_calls.RootCalls.enter",
    "capture.root_calls.RootCalls.leave",
    "capture.root_calls.RootCalls._enter_recomputation",
    "capture.root_calls.RootCalls.remove_exit_hook",
    "capture.call_signatures.CallSignatures.find",
    "capture.cuda.DeviceMarks.check_running",
    # the nodes of the graph
    "capture.autograd_hooks.BackwardTimestamps.hook_single_output",
    "capture.autograd_hooks.TimestampLog.add",
    # backward, fetch, optimizer, scaler, registration
    "capture.event_hooks.EventHooks._backward_begins",
    "capture.event_hooks.EventHooks._backward_ends",
    "capture.event_hooks.EventHooks._fetch_begins",
    "capture.event_hooks.EventHooks._fetch_ends",
    "capture.event_hooks.EventHooks._optimizer_begins",
    "capture.event_hooks.EventHooks._optimizer_ends",
    "capture.event_hooks.EventHooks._optimizer_fails",
    "capture.event_hooks.EventHooks._scaler_begins",
    "capture.event_hooks.EventHooks._scaler_ends",
    "capture.event_hooks.EventHooks._loss_scaled",
    "capture.event_hooks.EventHooks._optimizer_unscaled",
    "capture.event_hooks.EventHooks._scale_updated",
    "capture.event_hooks.EventHooks._module_registered",
    "capture.event_hooks.EventHooks._parameter_registered",
    "capture.event_hooks.EventHooks._buffer_registered",
    # what is read on the side
    "capture.gradient_norms.Gradients.read",
    "capture.tensor_watch.Watches._put_hook",
    "capture.tensor_watch.Watches._report",
    "capture.logged_values.LogReader.read",
    "capture.cuda.device_memory",
    "capture.logged_values.learning_rate",
    "capture.async_readback.read_async",
    # steps, the context, the way to the worker
    "capture.step_detector.StepDetector.forward_begins",
    "capture.step_detector.StepDetector.backward_ends",
    "capture.pending_records.PendingRecord.record",
    "capture.active_span.ActiveSpans._innermost",
    "capture.active_span.ActiveSpans.leave_step",
    "tracing.context.current_span",
)
"""What PyTorch or the program calls on a training thread, by its first function inside of the guard."""

COMPILED = (
    "capture.torch_compile.CompileHooks._end",
    "capture.torch_compile.CompileHooks._region",
    "capture.hook_manager.ModuleHooks.suspend",
    "capture.hook_manager.ModuleHooks.resume",
    "capture.root_calls.RootCalls.leave",
    "capture.module_calls.ModuleCallRecorder.open",
    "capture.autograd_hooks.TimestampLog.add",
)
"""The same where something is compiled or exported."""

ONCE = (
    "capture.module_registry.ModuleRegistry.describe",
    "capture.thread_state.ThreadState.__init__",
    "capture.step_detector.StepDetector.step_begins",
    "capture.step_detector.StepDetector.end",
    "capture.recorder.Capture.__init__",
    "capture.recorder.Capture.install",
    "capture.recorder.Capture.flush",
    "capture.recorder.Capture.end",
    "capture.hook_manager.ModuleHooks.install",
    "capture.event_hooks.EventHooks.install",
    "capture.torch_compile.CompileHooks.install",
    "capture.torch_compile.CompileHooks._trace_rules_imported",
    "capture.tensor_watch.Watches.install",
    "capture.tensor_watch.Watches.uninstall",
    "capture.torch_internals.around_fetch",
    "capture.torch_internals.after_scaling",
    "capture.torch_internals.around_compilation",
)
"""What is called once, most of it by `instrument()`, `flush()`, `shutdown()` and `stats()`."""

WORKER = (
    "worker.buffer.Buffer.append",
    "worker.backend.ThreadBackend._make_pipeline",
    "worker.backend.ThreadBackend.stats",
    "exporters.factory.MetricExporters.__init__",
    "exporters.factory.MetricExporters.shutdown",
    "worker.thread.Worker._drain",
    "worker.thread.Worker._answer_flushes",
    "worker.backend.ThreadBackend.before_first",
    "_session.Session._measure_overhead",
    "tracing.evaluation_folding.EvaluationFold.pop_quiet",
    "tracing.evaluation_folding.EvaluationFold.pop_all",
    "metrics.aggregation.Exemplars.arrive",
    "sampling.tail.TailSampler.reason",
    "metrics.store.Metrics.add",
    "tracing.call_tree.CallTreeBuilder.build",
    "tracing.trace_builder.TraceBuilder.build",
    "exporters.run_file.record_line",
    "exporters.factory._make_otlp",
    "exporters.otlp.encoder.SpanEncoder.slices",
    "exporters.otlp.encoder.Envelope.wrap",
    "exporters.otlp.http.HttpTransport.pack",
    "exporters.otlp.sender.Sender._deliver",
)
"""Functions of the worker thread. The tests cannot replace functions of a companion process."""


class InjectedError(Exception):
    """No error that anything of ours could expect."""


class Breakage:
    """A function that raises.

    Args:
        place: Where it is, in torchotel.
        only: At which of its calls; 0: at each.
    """

    def __init__(self, place: str, only: int) -> None:
        self.place, self._only = place, only
        self.raised = 0
        self._calls = 0

    def __call__(self, function: Any) -> Any:
        """Stand before a function."""

        def broken(*args: Any, **kwargs: Any) -> Any:
            self._calls += 1
            if not self._only or self._calls == self._only:
                self.raised += 1
                raise InjectedError(self.place)
            return function(*args, **kwargs)

        return broken


@contextmanager
def breaking(place: str, only: int = 0) -> Iterator[Breakage]:
    """Let a function of torchotel raise, wherever it was imported to."""
    module_name, owner, name = _find(place)
    found = vars(owner)[name]
    breakage = Breakage(place, only)
    broken = staticmethod(breakage(found.__func__)) if isinstance(found, staticmethod) else breakage(found)
    ours = [module for key, module in list(sys.modules.items()) if key.startswith("torchotel")]
    owners = ours if owner is sys.modules[module_name] else [owner]
    places = [one for one in owners if vars(one).get(name) is found]
    for one in places:
        setattr(one, name, broken)
    try:
        yield breakage
    finally:
        for one in places:
            setattr(one, name, found)


def _find(place: str) -> tuple[str, Any, str]:
    *path, name = f"torchotel.{place}".split(".")
    inside = [path.pop()] if path[-1].lstrip("_")[0].isupper() else []
    module_name = ".".join(path)
    owner = import_module(module_name)
    for part in inside:
        owner = getattr(owner, part)
    return module_name, owner, name
