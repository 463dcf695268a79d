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
    escaped,
    figure,
    ink_on,
    percent,
    rounded,
    shade,
)
from torchotel.runs.summary import LayerTime, has_several_models

_MAX_DEPTH = 24
"""Levels of a module path that are drawn."""


@dataclass(slots=True)
class Node:
    """A module, or a container that is never called itself, such as a ModuleList."""

    label: str
    layer: LayerTime | None = None
    children: "dict[str, Node]" = field(default_factory=dict)
    area_s: float = 0.0
    """Total time of the module in seconds, or that of its children if it is larger: shared modules, estimated ends."""


class Sector(NamedTuple):
    """One rectangle of the icicle."""

    id: str
    parent: str
    label: str
    area_s: float
    layer: LayerTime | None
    others: int = 0
    """Number of smaller modules that this sector stands for; 0: it is one module."""


def sectors(layers: Sequence[LayerTime], max_sectors: int) -> Sequence[Sector]:
    """Return the sectors of the `max_sectors` modules with the most time; each parent merges the others."""
    models: dict[str, Node] = {}
    for layer in layers:
        _insert(models.setdefault(layer.model, Node(layer.model)), layer)
    placed: list[Sector] = []
    for number, model in enumerate(models.values()):
        _compute_areas(model)
        placed += _flatten(model, str(number), "")
    if len(models) > 1:
        placed = [Sector("all", "", "all models", sum(node.area_s for node in models.values()), None)] + [
            sector if sector.parent else sector._replace(parent="all") for sector in placed
        ]
    return _limit(placed, max_sectors)


def _insert(model: Node, layer: LayerTime) -> None:
    if layer.is_root:
        model.layer = layer
        return
    node = model
    for part in layer.path.split(".", _MAX_DEPTH):
        node = node.children.setdefault(part, Node(part))
    node.layer = layer


def _compute_areas(node: Node) -> float:
    children_s = sum(_compute_areas(child) for child in node.children.values())
    node.area_s = max(node.layer.total_s if node.layer else 0.0, children_s)
    return node.area_s


def _flatten(node: Node, sector_id: str, parent: str) -> Iterator[Sector]:
    yield Sector(sector_id, parent, node.label, node.area_s, node.layer)
    for number, child in enumerate(node.children.values()):
        yield from _flatten(child, f"{sector_id}.{number}", sector_id)


def _limit(placed: Sequence[Sector], max_sectors: int) -> Sequence[Sector]:
    # No child is larger than its parent, and the sort is stable: the parents of a kept module are kept too.
    order = sorted(placed, key=lambda sector: -sector.area_s)
    kept_by_id = {sector.id: sector for sector in order[:max_sectors]}
    merged_counts: Counter[str] = Counter()
    area_s: Counter[str] = Counter()
    for sector in order[max_sectors:]:
        if sector.parent in kept_by_id:
            merged_counts[sector.parent] += 1
            area_s[sector.parent] += sector.area_s  # type: ignore[assignment] # Counter is typed for integers
    rest = [
        Sector(f"{parent}.rest", parent, f"{number:,} smaller", area_s[parent], None, others=number)
        for parent, number in merged_counts.items()
    ]
    return [sector for sector in placed if sector.id in kept_by_id] + rest


MAX_SECTORS = 2_000
"""Modules of one direction in the figure; smaller ones are merged."""
MAX_DRAWN_AT_ONCE = 300
"""Sectors that are drawn before a reader clicks one, unless fewer than three levels would be drawn."""

_MAX_TABLE_ROWS = 100
_MIN_LEVELS = 3
_ROW_PX = 16
_MIN_PX, _MAX_PX = 220, 640
_HEAD_PX = 54
"""Height of a direction's title and of the path bar below it."""


def section(content: Content) -> Section | None:
    """Return the section on modules, with one icicle for each direction; None if no module was timed."""
    directions = {"forward": content.summary.forward, "backward": content.summary.backward}
    timed = {name: layers for name, layers in directions.items() if layers}
    if not timed:
        return None
    trees = {name: sectors(layers, MAX_SECTORS) for name, layers in timed.items()}
    heights = [_height(placed) for placed in trees.values()]
    icicles, above, total_px = [], 0, sum(heights)
    for (name, placed), height in zip(trees.items(), heights, strict=True):
        domain = [1 - (above + height) / total_px, 1 - (above + _HEAD_PX / 2) / total_px]
        icicles.append(_icicle(name, timed[name], placed, domain))
        above += height
    drawn_figure = figure(icicles, total_px, margin={"l": 4, "r": 4, "t": 0, "b": 4})
    drawn_figure.update_layout(annotations=_titles(icicles), uniformtext={"minsize": 10, "mode": "hide"})
    summary = content.summary
    steps = f"{count(content.traces.detailed, 'training step')} with detail" if summary.steps else "evaluations"
    lead = (
        f"Total time of every module's calls in {steps}, by area; the deeper the colour, the more "
        "of it is the module's <em>own</em> time, without the modules inside it. Click a module to go in."
    )
    if summary.folded_calls:
        lead += " The own time of a module includes the calls inside it that are beyond <code>max_spans</code>."
    tables = "".join(_table(name, layers) for name, layers in timed.items())
    return Section("modules", "Time by module", lead, drawn_figure, f'<div class="pair">{tables}</div>')


def _height(placed: Sequence[Sector]) -> int:
    parents = {sector.parent for sector in placed}
    rows = min(MAX_DRAWN_AT_ONCE, sum(sector.id not in parents for sector in placed))
    return max(_MIN_PX, min(_MAX_PX, rows * _ROW_PX)) + _HEAD_PX


def _icicle(name: str, layers: Sequence[LayerTime], placed: Sequence[Sector], domain: list[float]) -> go.Icicle:
    # The own times of all modules are another sum: recomputed calls are in no call of the model.
    whole_s = sum(sector.area_s for sector in placed if not sector.parent) or 1.0
    largest_share = max((layer.share for layer in layers), default=0.0) or 1.0
    return go.Icicle(
        name=name,
        ids=[sector.id for sector in placed],
        parents=[sector.parent for sector in placed],
        labels=[escaped(sector.label, 32) for sector in placed],
        values=[rounded(remainder_s) for remainder_s in _remainders(placed)],
        text=[_label_text(sector, whole_s) for sector in placed],
        customdata=[[_hover_text(sector, whole_s), percent(sector.area_s / whole_s)] for sector in placed],
        branchvalues="remainder",
        domain={"y": domain},
        textfont={"color": [ink_on(PHASE_COLOURS[name], _strength(sector, largest_share)) for sector in placed]},
        marker={
            "colors": [shade(PHASE_COLOURS[name], _strength(sector, largest_share)) for sector in placed],
            "line": {"color": PAPER, "width": 1},
        },
        texttemplate="%{label}  %{text}",
        hovertemplate="%{customdata[0]}<extra></extra>",
        tiling={"orientation": "h", "pad": 0},
        pathbar={"visible": True, "thickness": 20, "edgeshape": "/"},
        sort=True,
        maxdepth=_levels(placed),
    )


def _levels(placed: Sequence[Sector]) -> int:
    """Return the number of levels that are drawn at once."""
    depths: dict[str, int] = {"": 0}
    for sector in placed:  # parents come before their children
        depths[sector.id] = depths[sector.parent] + 1
    by_depth = Counter(depths[sector.id] for sector in placed)
    levels, timed = 0, 0
    while by_depth[levels + 1] and (levels < _MIN_LEVELS or timed + by_depth[levels + 1] <= MAX_DRAWN_AT_ONCE):
        levels += 1
        timed += by_depth[levels]
    return levels


def _remainders(placed: Sequence[Sector]) -> Sequence[float]:
    """Return each area without its children's; with these values, rounding cannot make children exceed their parent."""
    children_s: Counter[str] = Counter()
    for sector in placed:
        children_s[sector.parent] += sector.area_s  # type: ignore[assignment] # Counter is typed for integers
    return [max(0.0, sector.area_s - children_s[sector.id]) for sector in placed]


def _strength(sector: Sector, largest_share: float) -> float:
    # Square root: a layer with a quarter of the largest share still has half of the colour.
    return math.sqrt(sector.layer.share / largest_share) if sector.layer else 0.0


def _label_text(sector: Sector, whole_s: float) -> str:
    share = percent(sector.area_s / whole_s)
    if sector.layer is None or sector.layer.is_root:  # a root's label is its class already
        return share
    return f"{escaped(sector.layer.type, 24)}  {share}"


def _hover_text(sector: Sector, whole_s: float) -> str:
    if sector.others:
        return f"{count(sector.others, 'smaller module')}<br>{duration(sector.area_s)} in all"
    if sector.layer is None:
        return (
            f"<b>{escaped(sector.label)}</b><br>a container, never called itself<br>{duration(sector.area_s)} inside it"
        )
    layer = sector.layer
    return (
        f"<b>{escaped(layer.path)}</b> ({escaped(layer.type)})<br>"
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
        f"<tr><td>{_breakable(layer.name(several=several))}</td><td>{escaped(layer.type, 24)}</td>"
        + _cell(layer.share, percent(layer.share))
        + _cell(layer.self_s, duration(layer.self_s))
        + _cell(layer.total_s, duration(layer.total_s))
        + _cell(layer.calls, f"{layer.calls:,}")
        + "</tr>"
        for layer in layers[:_MAX_TABLE_ROWS]
    )
    heads = "".join(
        f"<th><button>{head}</button></th>" for head in ("module", "type", "share", "own", "total", "calls")
    )
    caption = f'<i class="phase {name}"></i>{name}, by own time; shares of the time in modules'
    if len(layers) > _MAX_TABLE_ROWS:
        caption += f": the first {_MAX_TABLE_ROWS} of {len(layers):,}"
    return (
        f'<div class="scroll long"><table class=sortable><caption>{caption}</caption><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _breakable(name: str) -> str:
    """Escape a path and allow line breaks after its dots, so that long paths do not widen the table."""
    return escaped(name, 40).replace(".", ".<wbr>")


def _cell(value: float, text: str) -> str:
    """Return a table cell as HTML; the page sorts it by `value`."""
    return f'<td data-value="{value:.6g}">{text}</td>'
