"""Errors of torchotel's own, put into one of its functions after the other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

HOOKS = (
    # forward
    "capture.module_calls.CallRecorder.open",
    "capture.module_calls.CallRecorder.close_interrupted",
    "capture.module_calls.CallRecorder._add",
    "capture.module_calls.CallRecorder._add_failed",
    "capture.module_calls.CallRecorder._state_of",
    "capture.root_calls.Outermost.enter",
    "capture.root_calls.Outermost.leave",
    "capture.root_calls.Outermost._recompute",
    "capture.root_calls.Outermost.drop_exit_hook",
    "capture.call_signatures.Sites.find",
    "capture.cuda.DeviceMarks.look",
    # the nodes of the graph
    "capture.autograd_hooks.BackwardStamps.hook_one",
    "capture.autograd_hooks.StampLog.add",
    # backward, fetch, optimizer, scaler, registration
    "capture.event_hooks.Events._backward_begins",
    "capture.event_hooks.Events._backward_ends",
    "capture.event_hooks.Events._fetch_begins",
    "capture.event_hooks.Events._fetch_ends",
    "capture.event_hooks.Events._optimizer_begins",
    "capture.event_hooks.Events._optimizer_ends",
    "capture.event_hooks.Events._optimizer_fails",
    "capture.event_hooks.Events._scaler_begins",
    "capture.event_hooks.Events._scaler_ends",
    "capture.event_hooks.Events._loss_scaled",
    "capture.event_hooks.Events._optimizer_unscaled",
    "capture.event_hooks.Events._scale_updated",
    "capture.event_hooks.Events._module_registered",
    "capture.event_hooks.Events._parameter_registered",
    "capture.event_hooks.Events._buffer_registered",
    # what is read on the side
    "capture.gradient_norms.Gradients.take",
    "capture.tensor_watch.Watches._put_hook",
    "capture.tensor_watch.Watches._report",
    "capture.logged_values.LogReader.read",
    "capture.cuda.device_memory",
    "capture.logged_values.learning_rate",
    "capture.async_readback.read_later",
    # steps, the context, the way to the worker
    "capture.step_detector.StepMachine.forward_begins",
    "capture.step_detector.StepMachine.backward_ends",
    "capture.pending_records.Held.record",
    "capture.active_span.LiveSpans._innermost",
    "capture.active_span.LiveSpans.leave_step",
    "tracing.context.current_span",
    "worker.buffer.Buffer.put",
)
"""What PyTorch or the program calls on a training thread, by its first function inside of the guard."""

COMPILED = (
    "capture.torch_compile.Compiling._end",
    "capture.torch_compile.Compiling._region",
    "capture.hook_manager.ModuleHooks.suspend",
    "capture.hook_manager.ModuleHooks.resume",
    "capture.root_calls.Outermost.leave",
    "capture.module_calls.CallRecorder.open",
    "capture.autograd_hooks.StampLog.add",
)
"""The same where something is compiled or exported."""

ONCE = (
    "capture.module_registry.Paths.describe",
    "capture.thread_state.ThreadState.__init__",
    "capture.step_detector.StepMachine.step_begins",
    "capture.step_detector.StepMachine.end",
    "capture.recorder.Capture.__init__",
    "capture.recorder.Capture.install",
    "capture.recorder.Capture.flush",
    "capture.recorder.Capture.end",
    "capture.hook_manager.ModuleHooks.install",
    "capture.event_hooks.Events.install",
    "capture.torch_compile.Compiling.install",
    "capture.torch_compile.Compiling._trace_rules_imported",
    "capture.tensor_watch.Watches.install",
    "capture.tensor_watch.Watches.uninstall",
    "capture.torch_internals.around_fetch",
    "capture.torch_internals.after_scaling",
    "capture.torch_internals.around_compilation",
    "exporters.factory.Publisher.__init__",
    "exporters.factory.Publisher.prepare",
    "exporters.factory.Publisher.shutdown",
    "_session.Session.stats",
)
"""What is called once, most of it by `instrument()`, `flush()`, `shutdown()` and `stats()`."""

WORKER = (
    "worker.thread.Worker._drain",
    "worker.thread.Worker._answer_flushes",
    "_session.Session._prepare",
    "_session.Session._make_pipeline",
    "_session.Session._first",
    "_session.Session._weigh",
    "tracing.evaluation_folding.EvaluationFold.quiet",
    "tracing.evaluation_folding.EvaluationFold.rest",
    "metrics.aggregation.Exemplars.arrive",
    "sampling.tail.Keeper.reason",
    "metrics.store.Metrics.add",
    "tracing.call_tree.CallTimer.time",
    "tracing.trace_builder.TraceBuilder.build",
    "exporters.run_file.unit_line",
    "exporters.factory._make_otlp",
    "exporters.otlp.trace_exporter.RequestExporter.prepare",
    "exporters.otlp.encoder.SpanEncoder.slices",
    "exporters.otlp.encoder.Envelope.wrap",
    "exporters.otlp.http.HttpTransport.pack",
    "exporters.otlp.sender.Sender._deliver",
)
"""What the worker's and the sender's threads call."""


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
