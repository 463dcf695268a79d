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
"""More than that run at once in no program, but in a stranger's file they might."""
MAX_DEPTH = 1000


class Placed(NamedTuple):
    """A span with its track's number."""

    span: SpanLine
    track: int


class Interval(NamedTuple):
    """When a track is taken, in ns."""

    start_ns: int
    end_ns: int


@dataclass
class Tracks:
    """Choose tracks for one trace after another; times are kept for each trace, spans are not.

    A trace begins on the first track on which nothing else runs then, so the steps of one thread stand on one track.
    What overlaps in it (calls on several devices or threads) goes to further ones.
    """

    threads: list[Hashable] = field(default_factory=list)
    """The thread of each track."""
    _taken: list[list[Interval]] = field(default_factory=list)
    """In order."""

    def place(self, trace: Sequence[SpanLine], thread: Hashable) -> Sequence[Placed]:
        """Give the spans of a trace in the order of their starts, but for those that found no track.

        Args:
            trace: All its spans.
            thread: What ran it; traces of different threads never share a track.
        """
        lanes = _lanes(trace)
        tracks: dict[int, int] = {}
        placed = []
        for number, lane in enumerate(lanes):
            track = self._find(Interval(lane[0].start_ns, max(_end_ns(span) for span in lane)), thread)
            if track is not None:
                tracks[number] = track
                placed += [Placed(span, track) for span in lane]
        placed.sort(key=lambda one: (one.span.start_ns, -_end_ns(one.span)))
        return placed

    def _find(self, wanted: Interval, thread: Hashable) -> int | None:
        for track, taken in enumerate(self._taken):
            if self.threads[track] == thread and _is_free(taken, wanted):
                insort(taken, wanted)
                return track
        if len(self.threads) >= MAX_TRACKS:
            return None
        self.threads.append(thread)
        self._taken.append([wanted])
        return len(self.threads) - 1


def _is_free(taken: Sequence[Interval], wanted: Interval) -> bool:
    place = bisect_right(taken, wanted)
    before = place == 0 or taken[place - 1].end_ns <= wanted.start_ns
    return before and (place == len(taken) or wanted.end_ns <= taken[place].start_ns)


@dataclass
class _Lane:
    spans: list[SpanLine] = field(default_factory=list)
    open: list[SpanLine] = field(default_factory=list)

    def takes(self, span: SpanLine, parents: Mapping[str, str]) -> bool:
        """Whether the span follows all that is here, or lies inside of an ancestor."""
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
    """Part a trace into lanes; a span stands on its parent's where it can. What is beyond `MAX_TRACKS` is left out."""
    parents = {span.span_id: span.parent_id for span in trace}
    lanes: list[_Lane] = []
    lane_of: dict[str, int] = {}
    # Sorting keeps the order of equals, and parents stand before their children.
    for span in sorted(trace, key=lambda span: (span.start_ns, -_end_ns(span))):
        preferred = lane_of.get(span.parent_id, 0)
        order = [preferred, *(number for number in range(len(lanes)) if number != preferred)]
        found = next((number for number in order if number < len(lanes) and lanes[number].takes(span, parents)), None)
        if found is None:
            if len(lanes) >= MAX_TRACKS:
                continue
            found = len(lanes)
            lanes.append(_Lane())
        lanes[found].add(span)
        lane_of[span.span_id] = found
    return [lane.spans for lane in lanes]


def _is_ancestor(span_id: str, span: SpanLine, parents: Mapping[str, str]) -> bool:
    parent = span.parent_id
    for _ in range(MAX_DEPTH):  # in a stranger's file they may run in a circle
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
"""Linux's largest: what is beyond it is none."""
COUNTERS = ("loss", "lr")
"""Logged values that are drawn as curves."""
_RUN = "run"
"""Where the span of the run stands."""


@dataclass
class ChromeTrace:
    """The trace events of a run, made while it is read."""

    run: Run
    spans: int = 0
    """Written so far."""
    left_out: int = 0
    """Spans that began before the run, or ran with more others than there are tracks. Our own files have none."""
    _base_ns: int = 0
    _pid: int = 1
    _tracks: Tracks = field(default_factory=Tracks)

    def chunks(self) -> Iterator[bytes]:
        """Give the file piece by piece; what is kept grows with the traces, by two numbers each."""
        self._base_ns, self._pid = _start_ns(self.run), _pid(self.run.info)
        head = {"displayTimeUnit": "ms", "otherData": _about(self.run.info, self._base_ns)}
        yield _json(head)[:-1] + b',"traceEvents":[\n' + _json(self._named("process_name", 0, _process(self.run.info)))
        for events in (self._span_events(), self._counter_events()):
            for event in events:
                yield b",\n" + _json(event)
        yield b"\n]}\n"

    def _span_events(self) -> Iterator[Event]:
        named = 0
        # A trace is written whole, as one line.
        for _, spans in groupby(self.run.spans(), key=lambda span: span.trace_id):
            trace = list(spans)
            timely = [span for span in trace if span.start_ns >= self._base_ns]
            placed = self._tracks.place(timely, _thread(trace))
            self.left_out += len(trace) - len(placed)
            self.spans += len(placed)
            for track in range(named, len(self._tracks.threads)):
                yield self._named("thread_name", track, _track_name(self._tracks.threads, track))
                yield self._metadata("thread_sort_index", track, {"sort_index": track})
            named = len(self._tracks.threads)
            yield from map(self._span, placed)

    def _span(self, placed: Placed) -> Event:
        span = placed.span
        parts = {name: _plain(value) for name, value in span.attributes.items()}
        return {
            "ph": "X",
            "name": _cut(span.name),
            "cat": _category(span),
            "ts": self._us(span.start_ns),
            "dur": max(0, span.end_ns - span.start_ns) / 1000,
            "pid": self._pid,
            "tid": placed.track,
            "args": parts if span.parent_id else {**parts, "trace_id": _cut(span.trace_id)},
        }

    def _counter_events(self) -> Iterator[Event]:
        for unit in self.run.units():
            end_ns = unit.start_unix_ns + round(unit.duration_s * 1e9)
            if unit.kind == "step" and end_ns >= self._base_ns:
                for name, value in _curves(unit).items():
                    event = {"ph": "C", "name": name, "ts": self._us(end_ns), "pid": self._pid, "tid": 0}
                    yield {**event, "args": {name: value}}

    def _named(self, kind: str, track: int, name: str) -> Event:
        return self._metadata(kind, track, {"name": name})

    def _metadata(self, kind: str, track: int, parts: Mapping[str, object]) -> Event:
        return {"ph": "M", "name": kind, "ts": 0, "pid": self._pid, "tid": track, "args": parts}

    def _us(self, time_ns: int) -> float:
        return (time_ns - self._base_ns) / 1000


def _start_ns(run: Run) -> int:
    """Find when the run began, where `run.json` does not say it by its steps and its first span."""
    started = run.info.get("started_unix_nano")
    if isinstance(started, str) and started.isdecimal() and len(started) < len(str(2**63)):
        return int(started)
    first_span = next(run.spans(), None)
    starts = [unit.start_unix_ns for unit in run.units()]
    starts += [first_span.start_ns] if first_span is not None else []
    return max(0, min(starts, default=0))


def _about(info: Mapping[str, Any], start_ns: int) -> dict[str, str]:
    said = {name: info.get(name) for name in ("run_id", "service_name", "torchotel.version")}
    about = {name: _cut(value) for name, value in said.items() if isinstance(value, str)}
    return {**about, "start_unix_nano": str(start_ns)}


def _resource(info: Mapping[str, Any]) -> Mapping[str, Any]:
    resource = info.get("resource")
    return resource if isinstance(resource, dict) else {}


def _pid(info: Mapping[str, Any]) -> int:
    pid = _resource(info).get("process.pid")
    return pid if isinstance(pid, int) and 0 < pid <= MAX_PID else 1


def _process(info: Mapping[str, Any]) -> str:
    resource = _resource(info)
    rank = f" rank {resource.get(names.RANK)}" if resource.get(names.WORLD_SIZE, 1) != 1 else ""
    return _cut(f"{resource.get('service.name', 'torchotel')}{rank}")


def _thread(trace: Sequence[SpanLine]) -> Hashable:
    if trace[0].name == names.SPAN_RUN:
        return _RUN
    return next((span.attributes[names.THREAD_ID] for span in trace if names.THREAD_ID in span.attributes), None)


def _track_name(threads: Sequence[Hashable], track: int) -> str:
    thread, beside = threads[track], threads[:track].count(threads[track])
    known = [known for known in dict.fromkeys(threads) if known != _RUN]
    name = _RUN if thread == _RUN else f"thread {known.index(thread) + 1}"
    return f"{name}, overlapping {beside}" if beside else name


def _category(span: SpanLine) -> str:
    return "module" if names.MODULE_TYPE in span.attributes else "phase" if span.parent_id else "step"


def _curves(unit: RecordLine) -> dict[str, float]:
    values = {name: unit.values.get(name) for name in COUNTERS}
    values["gradient norm"] = unit.gradient_norm
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
