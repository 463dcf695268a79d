"""Draw the spans of the slowest step and of a median step."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from torchotel import _semconv as names
from torchotel._records import PHASE_SPANS
from torchotel.runs.html.advice import HAVE_MODULES
from torchotel.runs.html.data import NEAR_MEDIAN, Content, StepTrace
from torchotel.runs.html.style import (
    ALARM,
    FAINT,
    PAPER,
    PHASE_COLOURS,
    Section,
    count,
    duration,
    escaped,
    figure,
    ink_on,
    rounded,
    scale,
    shade,
)
from torchotel.runs.reader import SpanLine

MAX_BARS = 1_500
"""Spans of one step that are drawn, the longest first."""

_MAX_DEPTH = 24
_LANE_PX = 22
_PANEL_GAP_PX = 58
_MINUS = "\N{MINUS SIGN}"
_LABEL_SHARE = 0.02
"""Share of the panel's width that a bar needs for a label."""
_PHASES = {span: phase for phase, span in PHASE_SPANS.items()}
_PREFIXES = {names.FORWARD_PREFIX: "forward", names.BACKWARD_PREFIX: "backward"}


class Bar(NamedTuple):
    """One span and its position."""

    span: SpanLine
    lane: int
    """Number of spans that contain it."""
    phase: str


def section(content: Content) -> Section | None:
    """Return the section with one panel for each selected step; None if no span was recorded."""
    selected = content.traces.selected()
    if not selected:
        return None
    panels = [bars(step) for _, step in selected]
    heights = [max((bar.lane for bar in panel), default=0) + 1 for panel in panels]
    pixels = sum(heights) * _LANE_PX + len(panels) * _PANEL_GAP_PX
    drawn_figure = figure([], pixels + 20, barmode="overlay", bargap=0.08, hovermode="closest", showlegend=False)
    top = 1.0
    for number, ((title, step), panel, lanes) in enumerate(zip(selected, panels, heights, strict=True), 1):
        axis = "" if number == 1 else str(number)
        bottom = top - lanes * _LANE_PX / pixels
        _panel(drawn_figure, axis, panel, step, (max(0.0, bottom), top))
        drawn_figure.add_annotation(_title(f"{title}: {_describe(step, content.median_s)}", axis))
        top = bottom - _PANEL_GAP_PX / pixels
    drawn_figure.update_layout(margin={"l": 24, "r": 24, "t": 32, "b": 8}, uniformtext={"minsize": 9, "mode": "hide"})
    return Section(
        "timeline", "The slowest step and a median step", _lead(selected), drawn_figure, _differences(selected)
    )


def bars(step: StepTrace) -> Sequence[Bar]:
    """Assign lanes to the longest spans of a step; a span's lane is below its parent's."""
    by_id = {span.span_id: span for span in step.spans}
    longest = sorted(step.spans, key=lambda span: span.start_ns - span.end_ns)[:MAX_BARS]
    placed = []
    for span in longest:
        ancestry = _ancestry(span, by_id, step.root.span_id)
        if ancestry is not None:
            placed.append(Bar(span, len(ancestry) - 1, next(filter(None, map(_phase, ancestry)), "other")))
    return placed


def _ancestry(span: SpanLine, by_id: Mapping[str, SpanLine], root: str) -> Sequence[SpanLine] | None:
    """Return a span and its ancestors up to the step's root; None if the span is not a descendant of the root."""
    ancestry = [span]
    while ancestry[-1].span_id != root:
        parent = by_id.get(ancestry[-1].parent_id)
        if parent is None or len(ancestry) >= _MAX_DEPTH:
            return None
        ancestry.append(parent)
    return ancestry


def _phase(span: SpanLine) -> str | None:
    phase = _PHASES.get(span.name)
    return phase or next((phase for prefix, phase in _PREFIXES.items() if span.name.startswith(prefix)), None)


def _panel(
    drawn_figure: go.Figure, axis: str, panel: Sequence[Bar], step: StepTrace, domain: tuple[float, float]
) -> None:
    record, factor = scale(step.duration_s)
    lanes = max((bar.lane for bar in panel), default=0)
    began_ns = step.root.start_ns
    lengths_s = [max(0, bar.span.end_ns - bar.span.start_ns) / 1e9 for bar in panel]
    drawn_figure.add_trace(
        go.Bar(
            orientation="h",
            xaxis=f"x{axis}",
            yaxis=f"y{axis}",
            base=[rounded((bar.span.start_ns - began_ns) / 1e9 * factor) for bar in panel],
            x=[rounded(length_s * factor) for length_s in lengths_s],
            y=[bar.lane for bar in panel],
            width=0.96,
            insidetextfont={"size": 11, "color": [ink_on(*_colour(bar)) for bar in panel]},
            text=[
                escaped(_label(bar.span), 40) if length_s > _LABEL_SHARE * step.duration_s else ""
                for bar, length_s in zip(panel, lengths_s, strict=True)
            ],
            textposition="inside",
            insidetextanchor="start",
            textangle=0,
            constraintext="inside",
            customdata=[
                [_name(bar.span), duration(length_s), _error(bar.span)]
                for bar, length_s in zip(panel, lengths_s, strict=True)
            ],
            hovertemplate=f"<b>%{{customdata[0]}}</b><br>%{{customdata[1]}}, from %{{base:,.4~g}} {record}"
            "%{customdata[2]}<extra></extra>",
            marker={
                "color": [shade(*_colour(bar)) for bar in panel],
                "line": {"color": [ALARM if bar.span.error else PAPER for bar in panel], "width": 0.6},
            },
        )
    )
    drawn_figure.update_layout(
        {
            f"xaxis{axis}": {
                "anchor": f"y{axis}",
                "range": [0, rounded(step.duration_s * factor)],
                "ticksuffix": f" {record}",
                "tickfont": {"color": FAINT},
                "zeroline": False,
                "ticks": "outside",
                "showgrid": False,
            },
            f"yaxis{axis}": {
                "anchor": f"x{axis}",
                "domain": list(domain),
                "range": [lanes + 0.5, -0.5],
                "visible": False,
                "fixedrange": True,
            },
        }
    )


def _colour(bar: Bar) -> tuple[str, float]:
    # Steps and phases have the phase's full colour; modules alternate between lighter ones, so that neighbours differ.
    colour = PHASE_COLOURS[bar.phase]
    return colour, 1.0 if bar.lane <= 1 else 0.55 - 0.12 * (bar.lane % 2)


def _name(span: SpanLine) -> str:
    model = span.attributes.get(names.MODEL)
    return escaped(span.name) + (f" of {escaped(model)}" if model is not None else "")


def _label(span: SpanLine) -> str:
    path = span.attributes.get(names.MODULE_PATH)
    if path is not None and names.MODULE_TYPE in span.attributes:
        *ancestry, last = str(path).split(".")
        # An element of a container is identified by the container's name and its index: `layer1.2`.
        return f"{ancestry[-1]}.{last}" if ancestry and last.isdecimal() else last
    return span.name.removeprefix("torch.")


def _error(span: SpanLine) -> str:
    return f"<br>failed: {escaped(span.attributes.get(names.ERROR_TYPE, 'error'))}" if span.error else ""


def _describe(step: StepTrace, median_s: float) -> str:
    about = f"step {step.number:,}, {duration(step.duration_s)}"
    ratio = step.duration_s / median_s if median_s else 1.0
    if ratio > 1 + NEAR_MEDIAN:
        about += f", {ratio:.3g} times the median"
    return about if step.detailed else f"{about} (its modules were not recorded)"


def _title(text: str, axis: str) -> dict[str, object]:
    return {
        "text": f"<b>{text}</b>",
        "xref": f"x{axis} domain",
        "yref": f"y{axis} domain",
        "x": 0,
        "y": 1,
        "xanchor": "left",
        "yanchor": "bottom",
        "yshift": 3,
        "showarrow": False,
        "font": {"size": 13},
    }


def _lead(selected: Sequence[tuple[str, StepTrace]]) -> str:
    lead = (
        "Each bar is a span: the step, its phases, and the module calls inside them. Each step has a scale of its own."
    )
    max_spans = max(len(step.spans) for _, step in selected)
    if max_spans > MAX_BARS:
        lead += f" The longest {MAX_BARS:,} of up to {count(max_spans, 'span')} are drawn."
    if not all(step.detailed for _, step in selected):
        lead += f" {HAVE_MODULES}"
    return lead


def _differences(selected: Sequence[tuple[str, StepTrace]]) -> str:
    """Return an HTML table of the phases of the slow steps, next to those of the median step."""
    if len(selected) == 1:
        return ""
    *slow, (usual, median) = selected
    head = "".join(f"<th>{title.lower()}</th><th>more</th>" for title, _ in slow)
    usual_s = _phase_times(median)
    rows = ""
    for phase in usual_s:
        cells = ""
        for _, step in slow:
            times_s = _phase_times(step)
            more_s = times_s[phase] - usual_s[phase]
            cells += (
                f"<td>{duration(times_s[phase])}</td><td>{'+' if more_s >= 0 else _MINUS}{duration(abs(more_s))}</td>"
            )
        rows += f'<tr><td><i class="phase {phase}"></i>{phase}</td><td>{duration(usual_s[phase])}</td>{cells}</tr>'
    head = f"<thead><tr><th>phase</th><th>{usual.lower()}</th>{head}</tr></thead>"
    return f"<div class=scroll><table>{head}<tbody>{rows}</tbody></table></div>"


def _phase_times(step: StepTrace) -> dict[str, float]:
    """Return the seconds of each phase directly inside the step; the rest is `other`."""
    times_s = dict.fromkeys(_PHASES.values(), 0.0)
    for span in step.spans:
        phase = _PHASES.get(span.name)
        if phase and span.parent_id == step.root.span_id:
            times_s[phase] += max(0, span.end_ns - span.start_ns) / 1e9
    return {**times_s, "other": max(0.0, step.duration_s - sum(times_s.values()))}
