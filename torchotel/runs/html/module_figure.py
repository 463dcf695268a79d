"""Draw the time of modules as an icicle, with a table of the slowest."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import plotly.graph_objects as go

from torchotel.runs.html.data import Content
from torchotel.runs.html.style import (
    INK,
    PAPER,
    PHASE_COLOURS,
    Section,
    count,
    duration,
    figure,
    ink_on,
    percent,
    rounded,
    shade,
    shown,
)
from torchotel.runs.summary import LayerTime, has_several_models

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
    if layer.is_root:
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


MAX_SECTORS = 2_000
"""Modules of one direction that are in the figure; the smaller ones stand together."""
AT_ONCE = 300
"""Of them, those that are drawn before anybody goes in; at least three levels are."""

_LISTED = 100
_LEAST_LEVELS = 3
_ROW_PX = 16
_LEAST_PX, _MOST_PX = 220, 640
_HEAD_PX = 54
"""For the title of a direction, and the path bar below it."""


def section(content: Content) -> Section | None:
    """Draw one direction below the other, as wide as the page, or nothing if no module was timed."""
    directions = {"forward": content.summary.forward, "backward": content.summary.backward}
    drawn = {name: layers for name, layers in directions.items() if layers}
    if not drawn:
        return None
    trees = {name: sectors(layers, MAX_SECTORS) for name, layers in drawn.items()}
    heights = [_height(found) for found in trees.values()]
    icicles, above, whole = [], 0, sum(heights)
    for (name, found), height in zip(trees.items(), heights, strict=True):
        domain = [1 - (above + height) / whole, 1 - (above + _HEAD_PX / 2) / whole]
        icicles.append(_icicle(name, drawn[name], found, domain))
        above += height
    made = figure(icicles, whole, margin={"l": 4, "r": 4, "t": 0, "b": 4})
    made.update_layout(annotations=_titles(icicles), uniformtext={"minsize": 10, "mode": "hide"})
    summary = content.summary
    steps = f"{count(content.traces.detailed, 'training step')} with detail" if summary.steps else "evaluations"
    lead = (
        f"Total time of every module's calls in {steps}, by area; the deeper the colour, the more "
        "of it is the module's <em>own</em> time, without the modules inside it. Click a module to go in."
    )
    if summary.folded_calls:
        lead += " The own time of a module includes the calls inside it that are beyond <code>max_spans</code>."
    tables = "".join(_table(name, layers) for name, layers in drawn.items())
    return Section("modules", "Time by module", lead, made, f'<div class="pair">{tables}</div>')


def _height(found: Sequence[Sector]) -> int:
    parents = {one.parent for one in found}
    rows = min(AT_ONCE, sum(one.id not in parents for one in found))
    return max(_LEAST_PX, min(_MOST_PX, rows * _ROW_PX)) + _HEAD_PX


def _icicle(name: str, layers: Sequence[LayerTime], found: Sequence[Sector], domain: list[float]) -> go.Icicle:
    whole_s = sum(layer.self_s for layer in layers) or 1.0
    most = max((layer.share for layer in layers), default=0.0) or 1.0
    return go.Icicle(
        name=name,
        ids=[one.id for one in found],
        parents=[one.parent for one in found],
        labels=[shown(one.label, 32) for one in found],
        values=[rounded(left_s) for left_s in _remainders(found)],
        text=[_text(one, whole_s) for one in found],
        customdata=[[_words(one, whole_s), percent(one.area_s / whole_s)] for one in found],
        branchvalues="remainder",
        domain={"y": domain},
        textfont={"color": [ink_on(PHASE_COLOURS[name], _strength(one, most)) for one in found]},
        marker={
            "colors": [shade(PHASE_COLOURS[name], _strength(one, most)) for one in found],
            "line": {"color": PAPER, "width": 1},
        },
        texttemplate="%{label}  %{text}",
        hovertemplate="%{customdata[0]}<extra></extra>",
        tiling={"orientation": "h", "pad": 0},
        pathbar={"visible": True, "thickness": 20, "edgeshape": "/"},
        sort=True,
        maxdepth=_levels(found),
    )


def _levels(found: Sequence[Sector]) -> int:
    """Choose how many levels are drawn at once."""
    depths: dict[str, int] = {"": 0}
    for one in found:  # parents stand before what is in them
        depths[one.id] = depths[one.parent] + 1
    by_depth = Counter(depths[one.id] for one in found)
    levels, drawn = 0, 0
    while by_depth[levels + 1] and (levels < _LEAST_LEVELS or drawn + by_depth[levels + 1] <= AT_ONCE):
        levels += 1
        drawn += by_depth[levels]
    return levels


def _remainders(found: Sequence[Sector]) -> Sequence[float]:
    """Take from each area what is inside it: a rounding then never makes a parent smaller than its children."""
    inside_s: Counter[str] = Counter()
    for one in found:
        inside_s[one.parent] += one.area_s  # type: ignore[assignment] # seconds are no whole numbers
    return [max(0.0, one.area_s - inside_s[one.id]) for one in found]


def _strength(one: Sector, most: float) -> float:
    # A root's scale: a layer with a quarter of the most time still has half of the colour.
    return math.sqrt(one.layer.share / most) if one.layer else 0.0


def _text(one: Sector, whole_s: float) -> str:
    share = percent(one.area_s / whole_s)
    if one.layer is None or one.layer.is_root:  # a container, or the root, which shows as its class
        return share
    return f"{shown(one.layer.type, 24)}  {share}"


def _words(one: Sector, whole_s: float) -> str:
    if one.others:
        return f"{count(one.others, 'smaller module')}<br>{duration(one.area_s)} in all"
    if one.layer is None:
        return f"<b>{shown(one.label)}</b><br>a container, never called itself<br>{duration(one.area_s)} inside it"
    layer = one.layer
    return (
        f"<b>{shown(layer.path)}</b> ({shown(layer.type)})<br>"
        f"own time {duration(layer.self_s)}, {percent(layer.self_s / whole_s)}<br>"
        f"total {duration(layer.total_s)}, {percent(layer.total_s / whole_s)}<br>"
        f"{count(layer.calls, 'call')} of {duration(layer.mean_s)}"
    )


def _titles(icicles: Sequence[go.Icicle]) -> Sequence[dict[str, object]]:
    return [
        {
            "text": f"<b>{icicle.name}</b>",
            "x": 0,
            "y": icicle.domain.y[1],
            "xref": "paper",
            "yref": "paper",
            "xanchor": "left",
            "yanchor": "bottom",
            "yshift": 6,
            "showarrow": False,
            "font": {"color": INK, "size": 13},
        }
        for icicle in icicles
    ]


def _table(name: str, layers: Sequence[LayerTime]) -> str:
    several = has_several_models(layers)
    rows = "".join(
        f"<tr><td>{_breakable(layer.name(several=several))}</td><td>{shown(layer.type, 24)}</td>"
        + _cell(layer.share, percent(layer.share))
        + _cell(layer.self_s, duration(layer.self_s))
        + _cell(layer.total_s, duration(layer.total_s))
        + _cell(layer.calls, f"{layer.calls:,}")
        + "</tr>"
        for layer in layers[:_LISTED]
    )
    heads = "".join(
        f"<th><button>{head}</button></th>" for head in ("module", "type", "share", "own", "total", "calls")
    )
    caption = f'<i class="phase {name}"></i>{name}, by own time'
    if len(layers) > _LISTED:
        caption += f": the first {_LISTED} of {len(layers):,}"
    return (
        f'<div class="scroll long"><table class=sortable><caption>{caption}</caption><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _breakable(name: str) -> str:
    """Let a long path break after its dots, so that it does not push the numbers out of view."""
    return shown(name, 40).replace(".", ".<wbr>")


def _cell(value: float, text: str) -> str:
    """Write a cell that is sorted by its value."""
    return f'<td data-value="{value:.6g}">{text}</td>'
