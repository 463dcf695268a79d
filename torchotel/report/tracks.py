"""Put spans on tracks on which they do not overlap, but for those inside their ancestors."""

from bisect import bisect_right, insort
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torchotel.report.read import SpanLine

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
