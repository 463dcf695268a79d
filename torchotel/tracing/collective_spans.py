"""The spans of collectives: each below the innermost span that it runs in."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence

from torchotel import _semconv as names
from torchotel._records import Collective, StepRecord
from torchotel.tracing.layout import Node
from torchotel.tracing.span import AttributeValue, SpanTemplate

MAX_TEMPLATES = 1024


class CollectiveSpans:
    """Add the collectives of detailed steps and evaluations to their traces."""

    def __init__(self) -> None:
        self._templates: dict[tuple[str, str, int], SpanTemplate] = {}

    def add(self, nodes: list[Node], record: StepRecord) -> None:
        """Append a node for each collective.

        Args:
            nodes: The nodes of phases and module calls, root first and parents before children, in times of the record.
            record: The record of these nodes.
        """
        if not (record.detailed and record.collectives):
            return
        finder = _ParentFinder(nodes)
        if (ratio := _overlap_ratio(nodes, record.collectives)) is not None:
            nodes[0].set(names.COLLECTIVE_OVERLAP_RATIO, ratio)
        for collective in record.collectives:
            if record.start_ns <= collective.start_ns <= record.end_ns:
                parent = finder.find(collective.start_ns, collective.end_ns)
                node = Node(self._template(collective), parent, collective.start_ns, collective.end_ns)
                node.set(names.COLLECTIVE_BYTES, collective.size_bytes)
                if collective.sequence:
                    node.set(names.COLLECTIVE_SEQUENCE, collective.sequence)
                if collective.modules:
                    node.set(names.COLLECTIVE_MODULES, collective.modules)
                if not collective.done_ns:
                    node.set(names.COLLECTIVE_END, "issued")
                nodes.append(node)

    def _template(self, collective: Collective) -> SpanTemplate:
        key = collective.operation, collective.group, collective.ranks
        template = self._templates.get(key)
        if template is None:
            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.clear()
            operation, group, ranks = key
            attributes: dict[str, AttributeValue] = {
                names.COLLECTIVE_OPERATION: operation,
                names.COLLECTIVE_GROUP: group,
                names.COLLECTIVE_RANKS: ranks,
            }
            template = self._templates[key] = SpanTemplate(names.COLLECTIVE_PREFIX + collective.operation, attributes)
        return template


def _overlap_ratio(nodes: Sequence[Node], collectives: Sequence[Collective]) -> float | None:
    """Return the share of the collectives' time in which this rank ran layers; None if no end is known.

    A layer counts if it has begun after the collective: what a layer itself calls, it may wait for.
    """
    parents = {node.parent for node in nodes}
    layers = sorted(
        (node.start_ns, node.end_ns) for index, node in enumerate(nodes) if node.parent > 0 and index not in parents
    )
    overlap_ns = total_ns = 0
    for collective in collectives:
        if collective.done_ns:
            total_ns += collective.done_ns - collective.start_ns
            first = bisect_left(layers, (collective.start_ns, 0))
            last = bisect_left(layers, (collective.done_ns, 0))
            overlap_ns += sum(min(end_ns, collective.done_ns) - start_ns for start_ns, end_ns in layers[first:last])
    return overlap_ns / total_ns if total_ns else None


class _ParentFinder:
    """Find the innermost node at a time.

    Args:
        nodes: Root first and parents before children.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        children: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for index in range(1, len(nodes)):
            children[nodes[index].parent].append((nodes[index].start_ns, index))
        self._children = {parent: sorted(below) for parent, below in children.items()}

    def find(self, start_ns: int, end_ns: int) -> int:
        """Return the innermost node that a span is inside of.

        A collective that outlasts its phase belongs to the phase in which it begins.
        """
        parent = self._below(0, start_ns, start_ns) or 0
        inner: int | None = parent
        while inner is not None:
            parent, inner = inner, self._below(inner, start_ns, end_ns)
        return parent

    def _below(self, parent: int, start_ns: int, end_ns: int) -> int | None:
        """Return the last child of a node that begins by `start_ns` and ends after `end_ns`."""
        below = self._children.get(parent, ())
        for _, index in reversed(below[: bisect_right(below, (start_ns, len(self._nodes)))]):
            if self._nodes[index].end_ns >= end_ns:
                return index
        return None
