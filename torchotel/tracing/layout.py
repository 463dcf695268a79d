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
NS_PER_US = 1000
MAX_TRACES = 1024
"""Traces whose spans are counted; a forgotten trace has its whole budget again."""

_start = attrgetter("start_ns")


class Node:
    """A span under construction; `parent` is the index of a node before it, -1 for the root."""

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
        """The id that was fixed while the span ran; such a span may have user spans below it and is never folded."""

    def set(self, name: str, value: AttributeValue) -> None:
        """Set an attribute of this span, in addition to the template's attributes."""
        if self.attributes is None:
            self.attributes = {}
        self.attributes[name] = value


def fold(nodes: Sequence[Node], max_spans: int | None, yielder: GilYielder) -> set[int]:
    """Fold the deepest nodes into their parents until at most `max_spans` are left; return the folded indices.

    The nearest node that is left gets the number of calls folded into it, and the time of those directly below it.
    """
    if max_spans is None or len(nodes) <= max_spans:
        return set()
    folded = _choose_folded(nodes, max_spans, yielder)
    calls: Counter[int] = Counter()
    times_ns: Counter[int] = Counter()
    for index in yielder(sorted(folded)):  # parents first
        node = nodes[index]
        ancestor = node.parent
        if ancestor not in folded:
            times_ns[ancestor] += node.end_ns - node.start_ns
        while ancestor in folded:
            ancestor = nodes[ancestor].parent
        calls[ancestor] += 1
    for index, count in yielder(calls.items()):
        nodes[index].set(names.FOLDED_CALLS, count)
        nodes[index].set(names.FOLDED_TIME, times_ns[index] / 1e9)
    return folded


def _choose_folded(nodes: Sequence[Node], max_spans: int, yielder: GilYielder) -> set[int]:
    """Choose the nodes below the deepest level that fits as a whole; phases stay as far as they fit."""
    levels = [0]
    for node in yielder(nodes[1:]):
        levels.append(levels[node.parent] + 1)
    counts = Counter(levels)
    deepest, total = 0, counts[0]
    while total + counts[deepest + 1] <= max_spans:
        deepest += 1
        total += counts[deepest]
    phases_left = max_spans - total if deepest < PHASE_LEVEL else 0
    unfoldable = _find_unfoldable(nodes, yielder)
    folded: set[int] = set()
    for index in yielder(range(1, len(nodes))):
        level = levels[index]
        if level <= deepest:
            continue
        if level == PHASE_LEVEL:
            phases_left -= 1
            if phases_left >= 0:
                continue
        if index not in unfoldable:
            folded.add(index)
    return folded


def _find_unfoldable(nodes: Sequence[Node], yielder: GilYielder) -> set[int]:
    """Return the nodes whose ids were fixed while they ran, and their ancestors."""
    unfoldable: set[int] = set()
    for index in yielder(range(len(nodes) - 1, 0, -1)):  # children first
        if nodes[index].span_id or index in unfoldable:
            unfoldable |= {index, nodes[index].parent}
    return unfoldable


def lay_out(nodes: Sequence[Node], yielder: GilYielder) -> None:
    """Move children inside their parents, and leave a microsecond between adjacent siblings.

    Jaeger has a resolution of one microsecond, and its critical path leaves out siblings that touch.
    """
    children: defaultdict[int, list[Node]] = defaultdict(list)
    for node in yielder(nodes[1:]):
        children[node.parent].append(node)
    for parent, siblings in yielder(children.items()):  # outer parents first
        siblings.sort(key=_start)
        _place(nodes[parent], siblings, yielder)


def _place(parent: Node, siblings: Sequence[Node], yielder: GilYielder) -> None:
    start_ns, end_ns = parent.start_ns, parent.end_ns
    before = None
    for node in yielder(siblings):
        if not start_ns <= node.start_ns <= node.end_ns <= end_ns:
            node.start_ns = min(max(node.start_ns, start_ns), end_ns)
            node.end_ns = max(node.start_ns, min(node.end_ns, end_ns))
        if before is not None and 0 <= node.start_ns - before.end_ns < NS_PER_US:
            start_us = node.start_ns // NS_PER_US
            if before.end_ns // NS_PER_US == start_us:
                before.end_ns = max(before.start_ns, start_us * NS_PER_US - 1)
        before = node


class TraceSpanBudget:
    """Count the spans that evaluations have added to each trace.

    Args:
        max_spans: The most spans of a trace; None: no limit.
    """

    def __init__(self, max_spans: int | None) -> None:
        self.max_spans = max_spans
        self._spent: dict[int, int] = {}
        """By trace id; the trace that spans were added to last is the last key."""

    def remaining(self, trace_id: int) -> int | None:
        """Return how many spans may be added to a trace; None: any number."""
        return None if self.max_spans is None else max(0, self.max_spans - self._spent.get(trace_id, 0))

    def spend(self, trace_id: int, spans: int) -> None:
        """Count spans that were added to a trace."""
        self._spent[trace_id] = self._spent.pop(trace_id, 0) + spans
        if len(self._spent) > MAX_TRACES:
            del self._spent[next(iter(self._spent))]
