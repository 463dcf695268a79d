"""Figure: how long steps took, and in which phase, over the run."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from torchotel.runs.html.data import Bucket, Content, StepTime, buckets
from torchotel.runs.html.style import ALARM, INK, PHASE_COLOURS, Section, count, figure, rounded, scale
from torchotel.runs.summary import PHASES, quantile

COLUMNS = 400
"""Bars that a screen can tell apart."""

_HEADROOM = 1.25
_MAX_TICKS = 5


def section(content: Content) -> Section | None:
    """Draw the steps, or nothing where there was none."""
    if not content.series.steps:
        return None
    found = buckets(content.series.steps, COLUMNS)
    unit, factor = scale(content.median_s)
    top_s = _top(found)
    cut_off = sum(bucket.median.duration_s > top_s for bucket in found)
    made = make_subplots(rows=2, shared_xaxes=True, row_heights=[0.32, 0.68], vertical_spacing=0.05)
    for trace in _durations(found, factor, unit):
        made.add_trace(trace, row=1, col=1)
    for trace in _phases(found, factor, unit):
        made.add_trace(trace, row=2, col=1)
    drawn = figure(made.data, 460, barmode="stack", bargap=0 if len(found) > COLUMNS // 4 else 0.08, hovermode="x")
    layout = made.layout.to_plotly_json()
    for name in ("xaxis", "xaxis2", "yaxis", "yaxis2"):
        drawn.update_layout({name: {key: layout[name][key] for key in ("anchor", "domain") if key in layout[name]}})
    drawn.update_layout(
        xaxis={"matches": "x2", "showticklabels": False},
        xaxis2={"title": {"text": "step"}, "tickformat": ",d"},
        yaxis={"type": "log", "title": {"text": f"step, {unit} (log)"}, "tickvals": _ticks(found, factor)},
        yaxis2={"title": {"text": f"phases, {unit}"}, "range": [0, rounded(top_s * factor)]},
    )
    return Section("steps", "Step time by phase", _lead(found, cut_off), drawn)


def _top(found: Sequence[Bucket]) -> float:
    """Choose where the bars end, so that one slow start does not press all others flat."""
    typical = sorted(bucket.median.duration_s for bucket in found)
    whole = typical[-1]
    usual = quantile(typical, 0.95) * _HEADROOM
    return usual if whole > 2 * usual else whole * 1.05


def _ticks(found: Sequence[Bucket], factor: float) -> Sequence[float]:
    """Choose round numbers for the log axis: plotly's own leave the powers of ten away from 2 and 5."""
    low = min(bucket.fastest.duration_s for bucket in found) * factor
    high = max(bucket.slowest.duration_s for bucket in found) * factor
    if low <= 0:
        low = high / 1e6
    powers = range(math.floor(math.log10(low or 1)), math.ceil(math.log10(high or 1)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**power for power in powers for digit in digits]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) <= _MAX_TICKS:
            return inside or ticks
    return inside[:: math.ceil(len(inside) / _MAX_TICKS)]


def _lead(found: Sequence[Bucket], cut_off: int) -> str:
    steps = max(bucket.steps for bucket in found)
    if steps > 1:
        lead = (
            f"Each bar is a real step, the median one of {steps:,} in a row; the band above it goes from the fastest "
            "of them to the slowest, so that no outlier is averaged away."
        )
    else:
        lead = "Each bar is one step, cut into its phases; above it the same on a log scale, where outliers fit in too."
    if cut_off:
        lead += (
            f" {count(cut_off, 'bar')} {'is' if cut_off == 1 else 'are'} cut off at the top:"
            " double-click the figure to see all of it."
        )
    return lead


def _durations(found: Sequence[Bucket], factor: float, unit: str) -> Sequence[go.Scatter]:
    x = [_centre(bucket) for bucket in found]
    lines: dict[str, tuple[Sequence[StepTime], Mapping[str, Any]]] = {
        "fastest": ([bucket.fastest for bucket in found], {"line": {"width": 0}, "showlegend": False}),
        "slowest": (
            [bucket.slowest for bucket in found],
            {"line": {"width": 1, "color": ALARM}, "fill": "tonexty", "fillcolor": "rgba(179,18,61,0.12)"},
        ),
        "median": ([bucket.median for bucket in found], {"line": {"width": 1.2, "color": INK}}),
    }
    if all(bucket.steps == 1 for bucket in found):
        lines = {"whole step": ([bucket.median for bucket in found], {"line": {"width": 1.2, "color": INK}})}
    return [
        go.Scatter(
            name=name,
            x=x,
            y=[rounded(step.duration_s * factor) for step in steps],
            customdata=[[step.number, _detail(step)] for step in steps],
            hovertemplate=f"%{{y:,.4~g}} {unit}, step %{{customdata[0]:,d}}%{{customdata[1]}}",
            mode="lines" if len(found) > 1 else "lines+markers",
            **style,
        )
        for name, (steps, style) in lines.items()
    ]


def _phases(found: Sequence[Bucket], factor: float, unit: str) -> Sequence[go.Bar]:
    return [
        go.Bar(
            name=name,
            x=[_centre(bucket) for bucket in found],
            width=[bucket.last - bucket.first + 1 for bucket in found] if found[0].steps > 1 else None,
            y=[rounded(bucket.median.phases_s[place] * factor) for bucket in found],
            customdata=[[bucket.median.number, _share(bucket.median, place)] for bucket in found],
            marker={"color": PHASE_COLOURS[name], "line": {"width": 0}},
            hovertemplate=f"%{{y:,.4~g}} {unit} (%{{customdata[1]}} of step %{{customdata[0]:,d}})",
        )
        for place, name in enumerate(PHASES)
    ]


def _centre(bucket: Bucket) -> float:
    return (bucket.first + bucket.last) / 2


def _share(step: StepTime, place: int) -> str:
    return f"{step.phases_s[place] / step.duration_s:.0%}" if step.duration_s else "0%"


def _detail(step: StepTime) -> str:
    return ", in detail" if step.detailed else ""
