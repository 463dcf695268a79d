"""Draw the gradient norm of every layer over the steps as a heat map."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import plotly.graph_objects as go

from torchotel.runs.html.data import Content, Series, chunks, pick_finite, upper_median
from torchotel.runs.html.style import ALARM, LINE, ON_DARK, PAPER, Section, count, escaped, figure, rounded
from torchotel.runs.summary import quantile

MAX_COLUMNS, MAX_CELLS = 300, 100_000
_MAX_MARKS = 500
_ROW_PX = 13
_MIN_PX, _MAX_PX = 260, 760
_LABELLED = 60
"""Largest number of layers that are all labelled at the side."""
_MIN_TICKS, _MAX_TICKS = 3, 8
_FEW_STEPS = 10
"""Largest number of steps that are all labelled below; plotly would label half steps."""

_PICKS: dict[str, Callable[[Sequence[float]], float]] = {"largest": max, "median": upper_median, "smallest": min}


def section(content: Content) -> Section | None:
    """Return the section on gradient norms; None if no norm was recorded."""
    series = content.series
    if not series.norms:
        return None
    columns = list(chunks(range(len(series.norm_steps)), max(1, min(MAX_COLUMNS, MAX_CELLS // len(series.norms)))))
    picks = _PICKS if len(columns[0]) > 1 else {"norm": max}
    low, high = _bounds(series)
    maps = [
        _heatmap(series, columns, name, choose, (low, high), visible=index == 0)
        for index, (name, choose) in enumerate(picks.items())
    ]
    marks = _marks(series, columns)
    alarms = [_alarms(series, columns), marks] if marks else []
    height = max(_MIN_PX, min(_MAX_PX, len(series.norms) * _ROW_PX + 100))
    drawn_figure = figure([*maps, *alarms], height, xaxis=_steps(_edges(series, columns)), yaxis=_layers(series))
    if len(maps) > 1:
        drawn_figure.update_layout(updatemenus=[_buttons(list(picks), alarms=len(alarms))])
    return Section("norms", "Gradient norms by layer", _lead(series, len(columns[0]), marks), drawn_figure)


def _lead(series: Series, steps: int, marks: go.Scatter | None) -> str:
    lead = (
        "The L2 norm of the gradients of each layer's own parameters, before clipping, on a log scale: the first layer "
        f"at the top, the {count(len(series.norm_steps), 'step')} that were looked at from left to right, each up to "
        "half-way to the next, within the run."
    )
    if steps > 1:
        lead += f" A column stands for {steps:,} of them, and the buttons choose which of their norms it shows."
    if marks:
        lead += ' <strong class="alarm">A red cell has gradients that were NaN or infinite.</strong>'
    if series.layers_left_out:
        lead += f" Only the first {len(series.norms):,} layers are shown."
    return lead


def _bounds(series: Series) -> tuple[float, float]:
    logs = sorted(math.log10(norm) for row in series.norms.values() for norm in row if 0 < norm < math.inf)
    if not logs:
        return -1.0, 1.0
    # Single extreme norms get the outermost colour, so that they do not stretch the colour scale.
    low, high = quantile(logs, 0.005), quantile(logs, 0.995)
    return (low, high) if high - low > 1 else ((low + high - 1) / 2, (low + high + 1) / 2)


def _ticks(low: float, high: float) -> Mapping[float, str]:
    """Return round norms between two logarithms: powers of ten, and multiples of 2 and 5 if powers are too few."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    ticks = {power + math.log10(digit): f"{digit}e{power}" for power in powers for digit in (1, 2, 5)}
    inside = {log: text for log, text in ticks.items() if low <= log <= high}
    powers_of_ten = [log for log, text in inside.items() if text.startswith("1e")]
    tick_logs = (
        powers_of_ten[:: math.ceil(len(powers_of_ten) / _MAX_TICKS)]
        if len(powers_of_ten) >= _MIN_TICKS
        else list(inside)
    )
    return {log: inside[log] for log in tick_logs}


def _heatmap(
    series: Series,
    columns: Sequence[Sequence[int]],
    name: str,
    choose: Callable[[Sequence[float]], float],
    bounds: tuple[float, float],
    *,
    visible: bool,
) -> go.Heatmap:
    low, high = bounds
    ticks = _ticks(low, high)
    return go.Heatmap(
        name=name,
        x=_edges(series, columns),
        z=[
            [_log(pick_finite(row[part[0] : part[-1] + 1], choose), low) for part in columns]
            for row in series.norms.values()
        ],
        zmin=rounded(low),
        zmax=rounded(high),
        visible=visible,
        colorscale="Viridis",
        hoverongaps=False,
        hoverinfo="text",
        # The page's script builds the hover texts from these; the finished texts would be most of the page.
        meta={"rows": [escaped(name) for name in series.norms], "columns": [_column(series, part) for part in columns]},
        colorbar={
            "title": {"text": "L2 norm", "side": "right"},
            "tickvals": list(ticks),
            "ticktext": list(ticks.values()),
            "thickness": 12,
            "outlinewidth": 0,
        },
    )


def _column(series: Series, part: Sequence[int]) -> str:
    first, last = series.norm_steps[part[0]], series.norm_steps[part[-1]]
    return f"step {first:,}" if len(part) == 1 else f"{len(part):,} steps of {first:,} to {last:,}"


def _log(norm: float, low: float) -> float | None:
    """Return the rounded logarithm; 0 is drawn three powers of ten below the lowest colour, and NaN not at all."""
    if math.isnan(norm):
        return None
    return rounded(math.log10(norm)) if norm > 0 else rounded(low - 3)


def _alarms(series: Series, columns: Sequence[Sequence[int]]) -> go.Heatmap:
    """Return a heat map of the cells with NaN or infinity; the number of marks is limited, that of cells is not."""
    return go.Heatmap(
        x=_edges(series, columns),
        z=[
            [1 if any(map(math.isinf, row[part[0] : part[-1] + 1])) else None for part in columns]
            for row in series.norms.values()
        ],
        colorscale=[[0, ALARM], [1, ALARM]],
        showscale=False,
        hoverongaps=False,
        hovertemplate="NaN or infinite<extra></extra>",
    )


def _marks(series: Series, columns: Sequence[Sequence[int]]) -> go.Scatter | None:
    """Return crosses on the cells with NaN or infinity, for colour-blind readers."""
    points = [
        ((series.norm_steps[part[0]] + series.norm_steps[part[-1]]) / 2, layer)
        for part in columns
        for layer, row in enumerate(series.norms.values())
        if any(map(math.isinf, row[part[0] : part[-1] + 1]))
    ][:_MAX_MARKS]
    if not points:
        return None
    return go.Scatter(
        name="NaN or infinite",
        x=[step for step, _ in points],
        y=[layer for _, layer in points],
        mode="markers",
        marker={"symbol": "x", "size": 6, "color": ON_DARK},
        hovertemplate="NaN or infinite<extra></extra>",
    )


def _edges(series: Series, columns: Sequence[Sequence[int]]) -> list[float]:
    """Return the columns' edges, inside the run. A column reaches half-way to the next, as not every step has norms."""
    bounds = [(series.norm_steps[part[0]], series.norm_steps[part[-1]]) for part in columns]
    inner = [(last + first) / 2 for (_, last), (first, _) in pairwise(bounds)]
    (first, _), (_, last) = bounds[0], bounds[-1]
    before, after = (inner[0] - bounds[0][1], bounds[-1][0] - inner[-1]) if inner else (0.5, 0.5)
    run_start, run_end = series.steps[0].number - 0.5, series.steps[-1].number + 0.5
    return [max(first - before, run_start), *inner, min(last + after, run_end)]


def _steps(edges: Sequence[float]) -> dict[str, object]:
    few = edges[-1] - edges[0] <= _FEW_STEPS
    return {
        "title": {"text": "step"},
        "tickformat": ",d",
        "dtick": 1 if few else None,
        "showgrid": False,
        "range": [edges[0], edges[-1]],
    }


def _layers(series: Series) -> dict[str, object]:
    every = max(1, math.ceil(len(series.norms) / _LABELLED))
    places = list(range(0, len(series.norms), every))
    names = list(series.norms)
    return {
        "tickvals": places,
        "ticktext": [escaped(names[index], 36) for index in places],
        "showgrid": False,
        "range": [len(names) - 0.5, -0.5],
        "tickfont": {"size": 10},
    }


def _buttons(names: Sequence[str], *, alarms: int) -> dict[str, object]:
    return {
        "type": "buttons",
        "direction": "right",
        "x": 0,
        "y": 1,
        "xanchor": "left",
        "yanchor": "bottom",
        "pad": {"b": 6},
        "bgcolor": PAPER,
        "bordercolor": LINE,
        "font": {"color": "#7B8794"},  # plotly keeps the selected button light, in dark mode too
        "buttons": [
            {
                "label": name,
                "method": "restyle",
                "args": ["visible", [shown_name == name for shown_name in names] + [True] * alarms],
            }
            for name in names
        ],
    }
