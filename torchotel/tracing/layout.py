"""Fit a trace into Jaeger's limits: the number of spans, their order and their gaps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from operator import attrgetter

from torchotel import _semconv as names
from torchotel._records import Error
from torchotel._utils.gil import GilYielder
from torchotel.tracing.span import AttributeValue, SpanEvent, SpanLink, SpanTemplate

PHASE_LEVEL = 1
_start = attrgetter("start_ns")
NS_PER_US = 1000


class Node:
    """A span while its trace is being built; `parent` is an index that is lower than its own, -1 for the root."""

    __slots__ = (
        "attributes", "end_ns", "error", "events", "links", "parent", "span_id", "start_ns", "template",
    )  # fmt: skip

    def __init__(self, template: SpanTemplate, parent: int, start_ns: int, end_ns: int) -> None:
        self.template, self.parent, self.start_ns, self.end_ns = template, parent, start_ns, end_ns
        self.attributes: dict[str, AttributeValue] | None = None
        self.error: Error | None = None
        self.events: tuple[SpanEvent, ...] = ()
        self.links: tuple[SpanLink, ...] = ()
        self.span_id = 0
        """Given out while it ran: others may be below it, so it is never folded; 0: not yet."""

    def set(self, name: str, value: AttributeValue) -> None:
        """Set an attribute that only this span has."""
        if self.attributes is None:
            self.attributes = {}
        self.attributes[name] = value


def fold(nodes: Sequence[Node], max_spans: int | None, sliced: GilYielder) -> set[int]:
    """Fold the deepest spans into their parents until the trace has at most `max_spans`; return which are folded.

    The parent then says how many calls were folded into it, and how long those directly below it took.
    """
    folded: set[int] = set()
    if max_spans is None or len(nodes) <= max_spans:
        return folded
    levels = [0]
    for node in sliced(nodes[1:]):
        levels.append(levels[node.parent] + 1)
    counts = Counter(levels)
    deepest, total = 0, counts[0]
    while total + counts[deepest + 1] <= max_spans:
        deepest += 1
        total += counts[deepest]
    room = max_spans - total if deepest < PHASE_LEVEL else 0  # phases are kept as far as they fit
    calls: Counter[int] = Counter()
    times_ns: Counter[int] = Counter()
    kept = _above_given(nodes, sliced)
    for index in sliced(range(1, len(nodes))):
        node, level = nodes[index], levels[index]
        if level <= deepest or (level == PHASE_LEVEL and (room := room - 1) >= 0) or index in kept:
            continue
        folded.add(index)
        keeper = node.parent
        if keeper not in folded:
            times_ns[keeper] += node.end_ns - node.start_ns
        while keeper in folded:
            keeper = nodes[keeper].parent
        calls[keeper] += 1
    for keeper, count in sliced(calls.items()):
        nodes[keeper].set(names.FOLDED_CALLS, count)
        nodes[keeper].set(names.FOLDED_TIME, times_ns[keeper] / 1e9)
    return folded


def _above_given(nodes: Sequence[Node], sliced: GilYielder) -> set[int]:
    """Find the nodes whose ids were given out, and those above them."""
    kept: set[int] = set()
    for index in sliced(range(len(nodes) - 1, 0, -1)):  # children first
        if nodes[index].span_id or index in kept:
            kept |= {index, nodes[index].parent}
    return kept


def lay_out(nodes: Sequence[Node], sliced: GilYielder) -> None:
    """Put children inside their parents, and a microsecond between siblings that follow one another.

    Jaeger counts in microseconds, and touching siblings vanish from its critical path.
    """
    children: defaultdict[int, list[Node]] = defaultdict(list)
    for node in sliced(nodes[1:]):
        children[node.parent].append(node)
    for parent, siblings in sliced(children.items()):  # whose own parents came before them
        siblings.sort(key=_start)
        _place(nodes[parent], siblings, sliced)


def _place(parent: Node, siblings: Sequence[Node], sliced: GilYielder) -> None:
    start_ns, end_ns = parent.start_ns, parent.end_ns
    before = None
    for node in sliced(siblings):
        if not start_ns <= node.start_ns <= node.end_ns <= end_ns:
            node.start_ns = min(max(node.start_ns, start_ns), end_ns)
            node.end_ns = max(node.start_ns, min(node.end_ns, end_ns))
        if before is not None and 0 <= node.start_ns - before.end_ns < NS_PER_US:
            start_us = node.start_ns // NS_PER_US
            if before.end_ns // NS_PER_US == start_us:
                before.end_ns = max(before.start_ns, start_us * NS_PER_US - 1)
        before = node


MAX_TRACES = 1024
"""Traces that are remembered; one that was forgotten has all its room again."""


class TraceSpanBudget:
    """Add up what evaluations have put into each trace.

    Args:
        max_spans: Most spans of a trace; None: no limit.
    """

    def __init__(self, max_spans: int | None) -> None:
        self._max_spans = max_spans
        self._taken: dict[int, int] = {}
        """By trace id; the last that was taken from comes last."""

    def left(self, trace_id: int) -> int | None:
        """Return how many spans more a trace may have; None: any number."""
        return None if self._max_spans is None else max(0, self._max_spans - self._taken.get(trace_id, 0))

    def take(self, trace_id: int, spans: int) -> None:
        """Take note of spans of a trace."""
        self._taken[trace_id] = self._taken.pop(trace_id, 0) + spans
        if len(self._taken) > MAX_TRACES:
            del self._taken[next(iter(self._taken))]
