"""Draw the time of the steps and their phases over the run."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from torchotel._records import PHASES
from torchotel.runs.html.data import Bucket, Content, StepTime, buckets
from torchotel.runs.html.style import ALARM, INK, PHASE_COLOURS, Section, count, figure, rounded, scale
from torchotel.runs.summary import quantile

COLUMNS = 400
"""Bars that are distinguishable on a screen."""

_HEADROOM = 1.25
_MAX_TICKS = 5


def section(content: Content) -> Section | None:
    """Return the section on step times; None if the run has no step."""
    if not content.series.steps:
        return None
    bars = buckets(content.series.steps, COLUMNS)
    record, factor = scale(content.median_s)
    top_s = _top(bars)
    cut_off = sum(bucket.median.duration_s > top_s for bucket in bars)
    grid = make_subplots(rows=2, shared_xaxes=True, row_heights=[0.32, 0.68], vertical_spacing=0.05)
    for trace in _durations(bars, factor, record):
        grid.add_trace(trace, row=1, col=1)
    for trace in _phases(bars, factor, record):
        grid.add_trace(trace, row=2, col=1)
    drawn_figure = figure(
        grid.data, 460, barmode="stack", bargap=0 if len(bars) > COLUMNS // 4 else 0.08, hovermode="x"
    )
    layout = grid.layout.to_plotly_json()
    for name in ("xaxis", "xaxis2", "yaxis", "yaxis2"):
        drawn_figure.update_layout(
            {name: {key: layout[name][key] for key in ("anchor", "domain") if key in layout[name]}}
        )
    drawn_figure.update_layout(
        xaxis={"matches": "x2", "showticklabels": False},
        xaxis2={"title": {"text": "step"}, "tickformat": ",d"},
        yaxis={"type": "log", "title": {"text": f"step, {record} (log)"}, "tickvals": _ticks(bars, factor)},
        yaxis2={"title": {"text": f"phases, {record}"}, "range": [0, rounded(top_s * factor)]},
    )
    return Section("steps", "Step time by phase", _lead(bars, cut_off), drawn_figure)


def _top(bars: Sequence[Bucket]) -> float:
    """Return the upper end of the phase axis in seconds; a few very slow bars are cut off there."""
    typical = sorted(bucket.median.duration_s for bucket in bars)
    largest_s = typical[-1]
    usual_s = quantile(typical, 0.95) * _HEADROOM
    return usual_s if largest_s > 2 * usual_s else largest_s * 1.05


def _ticks(bars: Sequence[Bucket], factor: float) -> Sequence[float]:
    """Return round tick values for the log axis. plotly labels 2 and 5 without their power of ten."""
    low = min(bucket.fastest.duration_s for bucket in bars) * factor
    high = max(bucket.slowest.duration_s for bucket in bars) * factor
    if low <= 0:
        low = high / 1e6
    powers = range(math.floor(math.log10(low or 1)), math.ceil(math.log10(high or 1)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**power for power in powers for digit in digits]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) <= _MAX_TICKS:
            return inside or ticks
    return inside[:: math.ceil(len(inside) / _MAX_TICKS)]


def _lead(bars: Sequence[Bucket], cut_off: int) -> str:
    steps = max(bucket.steps for bucket in bars)
    if steps > 1:
        lead = (
            f"Each bar is a real step, the median one of {steps:,} in a row; the band above it goes from the fastest "
            "of them to the slowest, so that no outlier is averaged away."
        )
    else:
        lead = (
            "Each bar is one step, split into its phases. The line above shows whole steps on a log scale, with "
            "outliers."
        )
    if cut_off:
        lead += (
            f" {count(cut_off, 'bar')} {'is' if cut_off == 1 else 'are'} cut off at the top:"
            " double-click the figure to see all of it."
        )
    return lead


def _durations(bars: Sequence[Bucket], factor: float, record: str) -> Sequence[go.Scatter]:
    x = [_centre(bucket) for bucket in bars]
    lines: dict[str, tuple[Sequence[StepTime], Mapping[str, Any]]] = {
        "fastest": ([bucket.fastest for bucket in bars], {"line": {"width": 0}, "showlegend": False}),
        "slowest": (
            [bucket.slowest for bucket in bars],
            {"line": {"width": 1, "color": ALARM}, "fill": "tonexty", "fillcolor": "rgba(179,18,61,0.12)"},
        ),
        "median": ([bucket.median for bucket in bars], {"line": {"width": 1.2, "color": INK}}),
    }
    if all(bucket.steps == 1 for bucket in bars):
        lines = {"whole step": ([bucket.median for bucket in bars], {"line": {"width": 1.2, "color": INK}})}
    return [
        go.Scatter(
            name=name,
            x=x,
            y=[rounded(step.duration_s * factor) for step in steps],
            customdata=[[step.number, _detail(step)] for step in steps],
            hovertemplate=f"%{{y:,.4~g}} {record}, step %{{customdata[0]:,d}}%{{customdata[1]}}",
            mode="lines" if len(bars) > 1 else "lines+markers",
            **style,
        )
        for name, (steps, style) in lines.items()
    ]


def _phases(bars: Sequence[Bucket], factor: float, record: str) -> Sequence[go.Bar]:
    return [
        go.Bar(
            name=name,
            x=[_centre(bucket) for bucket in bars],
            width=[bucket.last - bucket.first + 1 for bucket in bars] if bars[0].steps > 1 else None,
            y=[rounded(bucket.median.phases_s[index] * factor) for bucket in bars],
            customdata=[[bucket.median.number, _share(bucket.median, index)] for bucket in bars],
            marker={"color": PHASE_COLOURS[name], "line": {"width": 0}},
            hovertemplate=f"%{{y:,.4~g}} {record} (%{{customdata[1]}} of step %{{customdata[0]:,d}})",
        )
        for index, name in enumerate(PHASES)
    ]


def _centre(bucket: Bucket) -> float:
    return (bucket.first + bucket.last) / 2


def _share(step: StepTime, index: int) -> str:
    return f"{step.phases_s[index] / step.duration_s:.0%}" if step.duration_s else "0%"


def _detail(step: StepTime) -> str:
    return ", in detail" if step.detailed else ""
