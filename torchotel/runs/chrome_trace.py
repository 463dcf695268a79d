"""Convert a run to Chrome's trace event format, which Perfetto and chrome://tracing open."""

import json
from bisect import bisect_right, insort
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

from torchotel import _semconv as names
from torchotel.runs.reader import RecordLine, Run, SpanLine, Value

MAX_TRACKS = 256
"""Largest number of tracks; spans of a damaged file that would need more are left out."""
MAX_DEPTH = 1000


class PlacedSpan(NamedTuple):
    """A span and the number of its track."""

    span: SpanLine
    track: int


class Interval(NamedTuple):
    """A time in nanoseconds during which a track is occupied."""

    start_ns: int
    end_ns: int


@dataclass
class TrackAllocator:
    """Allocate tracks to one trace after another. Times are kept for each trace; spans are not.

    A trace starts on the first free track of its thread, so the steps of one thread share a track. Spans that overlap
    within a trace (calls on several devices or threads) are placed on further tracks.
    """

    threads: list[Hashable] = field(default_factory=list)
    """The thread of each track."""
    _occupied: list[list[Interval]] = field(default_factory=list)
    """Occupied intervals of each track, in order."""

    def index(self, trace: Sequence[SpanLine], thread: Hashable) -> Sequence[PlacedSpan]:
        """Return the spans of a trace with their tracks, sorted by start; spans without a free track are left out.

        Args:
            trace: All spans of the trace.
            thread: The thread of the trace; traces of different threads never share a track.
        """
        lanes = _lanes(trace)
        tracks: dict[int, int] = {}
        placed = []
        for number, lane in enumerate(lanes):
            track = self._allocate(Interval(lane[0].start_ns, max(_end_ns(span) for span in lane)), thread)
            if track is not None:
                tracks[number] = track
                placed += [PlacedSpan(span, track) for span in lane]
        placed.sort(key=lambda placed_span: (placed_span.span.start_ns, -_end_ns(placed_span.span)))
        return placed

    def _allocate(self, interval: Interval, thread: Hashable) -> int | None:
        for track, occupied in enumerate(self._occupied):
            if self.threads[track] == thread and _is_free(occupied, interval):
                insort(occupied, interval)
                return track
        if len(self.threads) >= MAX_TRACKS:
            return None
        self.threads.append(thread)
        self._occupied.append([interval])
        return len(self.threads) - 1


def _is_free(occupied: Sequence[Interval], interval: Interval) -> bool:
    index = bisect_right(occupied, interval)
    before = index == 0 or occupied[index - 1].end_ns <= interval.start_ns
    return before and (index == len(occupied) or interval.end_ns <= occupied[index].start_ns)


@dataclass
class _Lane:
    spans: list[SpanLine] = field(default_factory=list)
    open: list[SpanLine] = field(default_factory=list)

    def accepts(self, span: SpanLine, parents: Mapping[str, str]) -> bool:
        """Return whether the span starts after all open spans of the lane have ended, or lies inside an ancestor."""
        while self.open and _end_ns(self.open[-1]) <= span.start_ns:
            self.open.pop()
        if not self.open:
            return True
        inner = self.open[-1]
        return _end_ns(span) <= _end_ns(inner) and _is_ancestor(inner.span_id, span, parents)

    def add(self, span: SpanLine) -> None:
        self.spans.append(span)
        self.open.append(span)


def _lanes(trace: Sequence[SpanLine]) -> Sequence[Sequence[SpanLine]]:
    """Distribute a trace over at most `MAX_TRACKS` lanes; a span shares its parent's lane if possible."""
    parents = {span.span_id: span.parent_id for span in trace}
    lanes: list[_Lane] = []
    lane_of: dict[str, int] = {}
    # The sort is stable, and parents come before their children.
    for span in sorted(trace, key=lambda span: (span.start_ns, -_end_ns(span))):
        preferred = lane_of.get(span.parent_id, 0)
        order = [preferred, *(number for number in range(len(lanes)) if number != preferred)]
        number = next(
            (number for number in order if number < len(lanes) and lanes[number].accepts(span, parents)), None
        )
        if number is None:
            if len(lanes) >= MAX_TRACKS:
                continue
            number = len(lanes)
            lanes.append(_Lane())
        lanes[number].add(span)
        lane_of[span.span_id] = number
    return [lane.spans for lane in lanes]


def _is_ancestor(span_id: str, span: SpanLine, parents: Mapping[str, str]) -> bool:
    parent = span.parent_id
    for _ in range(MAX_DEPTH):  # the parents in a damaged file can form a cycle
        if parent == span_id:
            return True
        if parent not in parents:
            return False
        parent = parents[parent]
    return False


def _end_ns(span: SpanLine) -> int:
    return max(span.start_ns, span.end_ns)


Event: TypeAlias = dict[str, Any]

MAX_TEXT = 1000
"""Characters of a name or a value."""
MAX_PID = 2**22
"""The largest process id of Linux; a larger number is not used."""
_RUN = "run"
"""Name of the track with the run's span."""


class ChromeTrace:
    """Convert a run to trace events while it is read.

    Args:
        runs: The run, or its ranks, each of which becomes a process.
    """

    def __init__(self, *runs: Run) -> None:
        base_ns = min(map(_start_ns, runs))
        # Ranks on several hosts can have equal process ids.
        pids = [_pid(runs[0].info)] if len(runs) == 1 else range(1, len(runs) + 1)
        self._processes = [_Process(run, base_ns, pid) for run, pid in zip(runs, pids, strict=True)]

    @property
    def spans(self) -> int:
        """Return the number of spans that have been written so far."""
        return sum(process.spans for process in self._processes)

    @property
    def left_out(self) -> int:
        """Return the number of spans that began before the run, or would need more than `MAX_TRACKS` tracks."""
        return sum(process.left_out for process in self._processes)

    def chunks(self) -> Iterator[bytes]:
        """Yield the file in pieces. Memory grows by two numbers for each trace."""
        first = self._processes[0]
        head = {"displayTimeUnit": "ms", "otherData": _about(first.run.info, first.base_ns)}
        separator = _json(head)[:-1] + b',"traceEvents":[\n'
        for process in self._processes:
            for event in process.events():
                yield separator + _json(event)
                separator = b",\n"
        yield b"\n]}\n"


@dataclass
class _Process:
    """Convert the run of one process to trace events."""

    run: Run
    base_ns: int
    """Unix time at which the trace starts."""
    pid: int
    spans: int = 0
    left_out: int = 0
    _tracks: TrackAllocator = field(default_factory=TrackAllocator)

    def events(self) -> Iterator[Event]:
        """Yield the events in the order of the run file."""
        yield self._named("process_name", 0, _process_name(self.run.info))
        yield from self._span_events()
        yield from self._counter_events()

    def _span_events(self) -> Iterator[Event]:
        named = 0
        # The run file writes a trace as one line, so its spans are consecutive.
        for _, spans in groupby(self.run.spans(), key=lambda span: span.trace_id):
            trace = list(spans)
            timely = [span for span in trace if span.start_ns >= self.base_ns]
            placed = self._tracks.index(timely, _thread(trace))
            self.left_out += len(trace) - len(placed)
            self.spans += len(placed)
            for track in range(named, len(self._tracks.threads)):
                yield self._named("thread_name", track, _track_name(self._tracks.threads, track))
                yield self._metadata("thread_sort_index", track, {"sort_index": track})
            named = len(self._tracks.threads)
            yield from map(self._span, placed)

    def _span(self, placed: PlacedSpan) -> Event:
        span = placed.span
        attributes = {name: _plain(value) for name, value in span.attributes.items()}
        return {
            "ph": "X",
            "name": _cut(span.name),
            "cat": _category(span),
            "ts": self._us(span.start_ns),
            "dur": max(0, span.end_ns - span.start_ns) / 1000,
            "pid": self.pid,
            "tid": placed.track,
            "args": attributes if span.parent_id else {**attributes, "trace_id": _cut(span.trace_id)},
        }

    def _counter_events(self) -> Iterator[Event]:
        for record in self.run.records():
            end_ns = record.start_unix_ns + round(record.duration_s * 1e9)
            if record.kind == "step" and end_ns >= self.base_ns:
                for name, value in _curves(record).items():
                    event = {"ph": "C", "name": name, "ts": self._us(end_ns), "pid": self.pid, "tid": 0}
                    yield {**event, "args": {name: value}}

    def _named(self, kind: str, track: int, name: str) -> Event:
        return self._metadata(kind, track, {"name": name})

    def _metadata(self, kind: str, track: int, attributes: Mapping[str, object]) -> Event:
        return {"ph": "M", "name": kind, "ts": 0, "pid": self.pid, "tid": track, "args": attributes}

    def _us(self, time_ns: int) -> float:
        return (time_ns - self.base_ns) / 1000


def _start_ns(run: Run) -> int:
    """Return the start of the run in Unix nanoseconds: from `run.json`, else from its steps and its first span."""
    started = run.info.get("started_unix_nano")
    if isinstance(started, str) and started.isdecimal() and len(started) < len(str(2**63)):
        return int(started)
    first_span = next(run.spans(), None)
    starts = [record.start_unix_ns for record in run.records()]
    starts += [first_span.start_ns] if first_span is not None else []
    return max(0, min(starts, default=0))


def _about(info: Mapping[str, Any], start_ns: int) -> dict[str, str]:
    texts = {name: info.get(name) for name in ("run_id", "service_name", "torchotel.version")}
    about = {name: _cut(value) for name, value in texts.items() if isinstance(value, str)}
    return {**about, "start_unix_nano": str(start_ns)}


def _resource(info: Mapping[str, Any]) -> Mapping[str, Any]:
    resource = info.get("resource")
    return resource if isinstance(resource, dict) else {}


def _pid(info: Mapping[str, Any]) -> int:
    pid = _resource(info).get("process.pid")
    return pid if isinstance(pid, int) and 0 < pid <= MAX_PID else 1


def _process_name(info: Mapping[str, Any]) -> str:
    resource = _resource(info)
    rank = f" rank {resource.get(names.RANK)}" if resource.get(names.WORLD_SIZE, 1) != 1 else ""
    return _cut(f"{resource.get('service.name', 'torchotel')}{rank}")


def _thread(trace: Sequence[SpanLine]) -> Hashable:
    if trace[0].name == names.SPAN_RUN:
        return _RUN
    return next((span.attributes[names.THREAD_ID] for span in trace if names.THREAD_ID in span.attributes), None)


def _track_name(threads: Sequence[Hashable], track: int) -> str:
    thread, overlapping = threads[track], threads[:track].count(threads[track])
    without_run = [name for name in dict.fromkeys(threads) if name != _RUN]
    name = _RUN if thread == _RUN else f"thread {without_run.index(thread) + 1}"
    return f"{name}, overlapping {overlapping}" if overlapping else name


def _category(span: SpanLine) -> str:
    return "module" if names.MODULE_TYPE in span.attributes else "phase" if span.parent_id else "step"


def _curves(record: RecordLine) -> dict[str, float]:
    values = {name: record.values.get(name) for name in names.LOGGED_GAUGES}
    values["gradient norm"] = record.gradient_norm
    return {
        name: value for name, value in values.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _plain(value: Value) -> object:
    if isinstance(value, str):
        return _cut(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
