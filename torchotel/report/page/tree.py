"""From the times of layers to the tree of modules that they stand in; pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torchotel.report.summary import LayerTime

_DEEPEST = 24
"""Levels of a path; a stranger's could have any number."""


@dataclass(slots=True)
class Node:
    """A module, or a container that is never called itself (a ModuleList)."""

    label: str
    layer: LayerTime | None = None
    inside: "dict[str, Node]" = field(default_factory=dict)
    area_s: float = 0.0
    """Its total time, or that of what is inside it where that is more: calls from elsewhere, estimated ends."""


class Sector(NamedTuple):
    """One place of the icicle."""

    id: str
    parent: str
    label: str
    area_s: float
    layer: LayerTime | None
    others: int = 0
    """Smaller modules that this one sector stands for; else 0."""


def sectors(layers: Sequence[LayerTime], most: int) -> Sequence[Sector]:
    """Lay out at most so many modules, the ones with most time; what is left out stands in its parent's `others`."""
    models: dict[str, Node] = {}
    for layer in layers:
        _place(models.setdefault(layer.model, Node(layer.model)), layer)
    found: list[Sector] = []
    for number, model in enumerate(models.values()):
        _measure(model)
        found += _walk(model, str(number), "")
    if len(models) > 1:
        found = [Sector("all", "", "all models", sum(node.area_s for node in models.values()), None)] + [
            one if one.parent else one._replace(parent="all") for one in found
        ]
    return _bounded(found, most)


def _place(model: Node, layer: LayerTime) -> None:
    if layer.path == layer.type:  # the root shows as its class
        model.layer = layer
        return
    node = model
    for part in layer.path.split(".", _DEEPEST):
        node = node.inside.setdefault(part, Node(part))
    node.layer = layer


def _measure(node: Node) -> float:
    inside_s = sum(_measure(child) for child in node.inside.values())
    node.area_s = max(node.layer.total_s if node.layer else 0.0, inside_s)
    return node.area_s


def _walk(node: Node, identity: str, parent: str) -> Iterator[Sector]:
    yield Sector(identity, parent, node.label, node.area_s, node.layer)
    for number, child in enumerate(node.inside.values()):
        yield from _walk(child, f"{identity}.{number}", identity)


def _bounded(found: Sequence[Sector], most: int) -> Sequence[Sector]:
    # No child is larger than its parent, and the sort is stable: a module that is kept has its parents with it.
    order = sorted(found, key=lambda one: -one.area_s)
    kept = {one.id: one for one in order[:most]}
    left: Counter[str] = Counter()
    area_s: Counter[str] = Counter()
    for one in order[most:]:
        if one.parent in kept:
            left[one.parent] += 1
            area_s[one.parent] += one.area_s  # type: ignore[assignment] # seconds are no whole numbers
    rest = [
        Sector(f"{parent}.rest", parent, f"{number:,} smaller", area_s[parent], None, others=number)
        for parent, number in left.items()
    ]
    return [one for one in found if one.id in kept] + rest
