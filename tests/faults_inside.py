"""Errors of torchotel's own, put into one of its functions after the other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

HOOKS = (
    # forward
    "capture.calls.CallRecorder.open",
    "capture.calls.CallRecorder.close_interrupted",
    "capture.calls.CallRecorder._add",
    "capture.calls.CallRecorder._add_failed",
    "capture.calls.CallRecorder._state_of",
    "capture.outermost.Outermost.enter",
    "capture.outermost.Outermost.leave",
    "capture.outermost.Outermost._recompute",
    "capture.outermost.Outermost.drop_exit_hook",
    "capture.sites.Sites.find",
    "capture.device_times.DeviceMarks.look",
    # the nodes of the graph
    "capture.backward.BackwardStamps.hook_one",
    "capture.backward.StampLog.add",
    # backward, fetch, optimizer, scaler, registration
    "capture.events.Events._backward_begins",
    "capture.events.Events._backward_ends",
    "capture.events.Events._fetch_begins",
    "capture.events.Events._fetch_ends",
    "capture.events.Events._optimizer_begins",
    "capture.events.Events._optimizer_ends",
    "capture.events.Events._scaler_begins",
    "capture.events.Events._scaler_ends",
    "capture.events.Events._loss_scaled",
    "capture.events.Events._optimizer_unscaled",
    "capture.events.Events._scale_updated",
    "capture.events.Events._module_registered",
    "capture.events.Events._parameter_registered",
    "capture.events.Events._buffer_registered",
    # what is read on the side
    "capture.gradients.Gradients.take",
    "capture.watch.Watches._put_hook",
    "capture.watch.Watches._report",
    "capture.logged.LogReader.read",
    "capture.memory.device_memory",
    "capture.rates.learning_rate",
    "capture.readings.read_later",
    # steps, the context, the way to the worker
    "capture.steps.StepMachine.forward_begins",
    "capture.steps.StepMachine.backward_ends",
    "capture.held.Held.record",
    "capture.live.LiveSpans._innermost",
    "capture.live.LiveSpans.leave_step",
    "telemetry.context.current_span",
    "_buffer.Buffer.put",
)
"""What PyTorch or the program calls on a training thread, by its first function inside of the guard."""

COMPILED = (
    "capture.compiling.Compiling._end",
    "capture.compiling.Compiling._region",
    "capture.hooks.ModuleHooks.suspend",
    "capture.hooks.ModuleHooks.resume",
    "capture.outermost.Outermost.leave",
    "capture.calls.CallRecorder.open",
    "capture.backward.StampLog.add",
)
"""The same where something is compiled or exported."""

ONCE = (
    "capture.paths.Paths.describe",
    "capture.thread.ThreadState.__init__",
    "capture.steps.StepMachine.step_begins",
    "capture.steps.StepMachine.end",
    "capture.capture.Capture.__init__",
    "capture.capture.Capture.install",
    "capture.capture.Capture.flush",
    "capture.capture.Capture.end",
    "capture.hooks.ModuleHooks.install",
    "capture.events.Events.install",
    "capture.compiling.Compiling.install",
    "capture.compiling.Compiling._trace_rules_imported",
    "capture.watch.Watches.install",
    "capture.watch.Watches.uninstall",
    "capture.seams.around_fetch",
    "capture.seams.after_scaling",
    "capture.seams.around_compilation",
    "_publisher.Publisher.__init__",
    "_publisher.Publisher.prepare",
    "_publisher.Publisher.shutdown",
    "_session.Session.stats",
)
"""What is called once, most of it by `instrument()`, `flush()`, `shutdown()` and `stats()`."""

WORKER = (
    "_worker.Worker._drain",
    "_worker.Worker._answer_flushes",
    "_session.Session._prepare",
    "_session.Session._make_pipeline",
    "_session.Session._first",
    "_session.Session._weigh",
    "telemetry.evaluations.EvaluationFold.quiet",
    "telemetry.evaluations.EvaluationFold.rest",
    "telemetry.exemplars.Exemplars.arrive",
    "telemetry.keeping.Keeper.reason",
    "telemetry.metrics.Metrics.add",
    "telemetry.timing.CallTimer.time",
    "telemetry.traces.TraceBuilder.build",
    "telemetry.lines.unit_line",
    "_exporting._make_otlp",
    "exporters.otlp.exporter.RequestExporter.prepare",
    "exporters.otlp.encode.SpanEncoder.slices",
    "exporters.otlp.encode.Envelope.wrap",
    "exporters.otlp.http_transport.HttpTransport.pack",
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
