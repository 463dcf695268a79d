"""Replay traces on a separate thread, so that a slow provider delays neither metrics nor the run file."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchotel._limits import MAX_BUFFER_SPANS
from torchotel._records import Baggage, SpanReference
from torchotel._utils.faults import Guard, Warn
from torchotel.exporters.base import TraceExporter
from torchotel.tracing.context import suppressed
from torchotel.tracing.span import Attributes, SpanContextSource, Trace

if TYPE_CHECKING:
    from torchotel.exporters.sdk.tracer_provider import TracerProviderExporter

INTERVAL_S = 0.5
"""Time between two pushes."""
MAX_WAITING_TRACES = 25_000
"""Traces that may wait; their roots are among the `MAX_WAITING` spans that are started."""
LATE = (
    "the TracerProvider does not process spans as fast as steps end, so spans are dropped (`spans_dropped` in stats() "
    "counts them). Check its span processors and its exporter"
)
UNSENT = (
    "the TracerProvider did not process %d spans before the deadline of shutdown; they are dropped. Check its span "
    "processors and its exporter, or call shutdown() with a longer timeout_s"
)


class ReplayThread(TraceExporter, SpanContextSource):
    """Pass traces to the exporter of a TracerProvider; if too many wait, the oldest are dropped.

    Args:
        exporter: Replays traces; it is called on this thread only, except for `start`, `end_unsampled`
            and `abandon`.
        guard: Counts internal errors.
    """

    def __init__(self, exporter: TracerProviderExporter, guard: Guard) -> None:
        self._exporter, self._stats = exporter, exporter.stats
        self.keeps_late, self.off = exporter.keeps_late, exporter.off
        self._replay, self._push = guard.guarded(self._replay_measured), guard.guarded(exporter.push)
        self._flush_exporter, self._shut_down = guard.guarded(exporter.flush), guard.guarded(exporter.shutdown)
        self._changed = threading.Condition()
        self._waiting: deque[Trace] = deque()
        self._waiting_spans = 0
        self._flushes: deque[tuple[float, queue.SimpleQueue[bool]]] = deque()
        """The deadline of each requested flush, and where its answer goes."""
        self._has_dropped = False
        """Whether spans were dropped since the last flush."""
        self._end_by_s: float | None = None
        """Deadline of the shutdown; None: there was none."""
        self._thread: threading.Thread | None = None
        self._span_ns = 0.0
        """CPU time of a span in the last trace that was replayed."""
        self._warn = Warn()

    def start(
        self,
        name: str,
        parent: SpanReference | None,
        start_ns: int,
        attributes: Attributes | None = None,
        baggage: Baggage | None = None,
        trace_id: int | None = None,
    ) -> SpanReference:
        """Start a span with the provider; from any thread."""
        return self._exporter.start(name, parent, start_ns, attributes, baggage, trace_id)

    def end_unsampled(self, span: SpanReference, end_ns: int) -> None:
        """End a root that the provider's sampler only records."""
        self._exporter.end_unsampled(span, end_ns)

    def export(self, trace: Trace) -> None:
        """Hand a trace to the thread; if no thread can be started, replay it at once."""
        if self._thread is None and self._end_by_s is None and not self._start_thread():
            self._replay(trace)
            return
        with self._changed:
            if self._end_by_s is not None:
                self._stats.dropped(len(trace.spans))
                return
            self._waiting.append(trace)
            self._waiting_spans += len(trace.spans)
            dropped = []
            while self._is_too_long():
                dropped.append(self._next())
            self._changed.notify()
        if dropped:  # without the lock: a log handler of the program may block
            self._drop(dropped)
            self._warn(LATE)

    def later_ns(self, spans: int) -> int:
        """Estimate the CPU time that the thread will spend on a trace."""
        return int(spans * self._span_ns)

    def flush(self, deadline_s: float) -> bool:
        """Replay all traces and flush the provider. Return False on timeout or if spans were dropped."""
        if self._is_current():
            return False
        answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        with self._changed:
            dropped, self._has_dropped = self._has_dropped, False
            self._flushes.append((deadline_s, answers))
            self._changed.notify()
        if self._thread is None:
            self._answer()
        try:
            return answers.get(timeout=max(0.0, deadline_s - time.monotonic())) and not dropped
        except queue.Empty:
            return False

    def shutdown(self, deadline_s: float) -> None:
        """Replay all traces by the deadline, drop the others, and flush the provider."""
        with self._changed:
            self._end_by_s = deadline_s
            self._changed.notify()
        if self._thread is None:
            self._exporter.shutdown(deadline_s)
            return
        if not self._is_current():
            self._thread.join(max(0.0, deadline_s - time.monotonic()))
        with self._changed:
            spans, dropped = self._waiting_spans, [self._next() for _ in range(len(self._waiting))]
        self._drop(dropped)
        self._exporter.abandon()
        if dropped:
            self._warn(UNSENT, spans)

    def _is_current(self) -> bool:
        """Return whether a processor of the program calls this, which cannot wait for itself."""
        return threading.current_thread() is self._thread

    def _start_thread(self) -> bool:
        thread = threading.Thread(target=self._run, name="torchotel-replay", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending, or the process has too many threads
            return False
        self._thread = thread
        return True

    def _is_too_long(self) -> bool:
        n_traces = len(self._waiting)
        return n_traces > MAX_WAITING_TRACES or (self._waiting_spans > MAX_BUFFER_SPANS and n_traces > 1)

    def _next(self) -> Trace:
        trace = self._waiting.popleft()
        self._waiting_spans -= len(trace.spans)
        return trace

    def _drop(self, traces: Sequence[Trace]) -> None:
        for trace in traces:
            self._has_dropped = True
            self._stats.dropped(len(trace.spans), queue=True)
            self._exporter.forget(trace)

    def _run(self) -> None:
        with suppressed():  # a processor that runs a model is not recorded
            self._replay_all()

    def _replay_all(self) -> None:
        push_at_s = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work, INTERVAL_S)
                trace = self._next() if self._waiting else None
            if trace is not None:
                self._replay(trace)
            elif self._flushes:
                self._answer()
            elif self._end_by_s is not None:
                self._shut_down(self._end_by_s)
                return
            if (now_s := time.monotonic()) >= push_at_s:
                push_at_s = now_s + INTERVAL_S
                self._push()

    def _has_work(self) -> bool:
        return bool(self._waiting or self._flushes) or self._end_by_s is not None

    def _replay_measured(self, trace: Trace) -> None:
        started_ns = time.thread_time_ns()
        self._exporter.export(trace)
        self._span_ns = (time.thread_time_ns() - started_ns) / len(trace.spans)

    def _answer(self) -> None:
        deadline_s, answers = self._flushes.popleft()
        answers.put(bool(self._flush_exporter(deadline_s)))
