"""Draw logged values and the norm of all gradients over the steps."""

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from torchotel.runs.html.data import Content, chunks, pick_finite, upper_median
from torchotel.runs.html.style import INK, Section, escaped, figure, rounded

_POINTS = 400
_ROW_PX = 170
_BAND = "rgba(31,41,51,0.14)"


def section(content: Content) -> Section | None:
    """Return the section with one small plot for each name; None if no value was logged."""
    names = [name for name in content.series.logged_in_order() if content.series.logged[name][0]]
    if not names:
        return None
    columns = min(len(names), 3)
    rows = -(-len(names) // columns)
    grid = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[f"<b>{escaped(name, 32)}</b>" for name in names],
        horizontal_spacing=0.07,
        vertical_spacing=0.34 / rows,
    )
    cut = False
    for index, name in enumerate(names):
        numbers, values = content.series.logged[name]
        cut = cut or len(numbers) > _POINTS
        row, column = index // columns + 1, index % columns + 1
        for trace in _line(numbers, values):
            grid.add_trace(trace, row=row, col=column)
        if min(values) == max(values) != 0:  # plotly's default range of ±1 would hide a small constant
            grid.update_yaxes(range=sorted((values[0] * 0.5, values[0] * 1.5)), row=row, col=column)
    drawn_figure = figure(grid.data, rows * _ROW_PX + 50, showlegend=False, hovermode="x")
    for axis in grid.layout:
        if axis.startswith(("xaxis", "yaxis")):
            drawn_figure.update_layout({axis: grid.layout[axis].to_plotly_json()})
    drawn_figure.update_layout(annotations=[note.to_plotly_json() for note in grid.layout.annotations])
    drawn_figure.update_annotations(font={"size": 12})
    lead = "What the program logged, and the L2 norm of all gradients before clipping, by step."
    if cut:
        lead += " A line is the median of steps in a row, its band their smallest and largest."
    return Section("logged", "Loss and what else was logged", lead, drawn_figure)


def _line(numbers: Sequence[int], values: Sequence[float]) -> Sequence[go.Scatter]:
    parts = list(chunks(range(len(numbers)), _POINTS))
    x = [numbers[part[len(part) // 2]] for part in parts]
    lowest, highest, typical = (
        [rounded(pick_finite(values[part[0] : part[-1] + 1], choose)) for part in parts]
        for choose in (min, max, upper_median)
    )
    median = go.Scatter(
        x=x,
        y=typical,
        mode="lines" if len(x) > 1 else "markers",
        line={"color": INK, "width": 1.4},
        hovertemplate="%{y:.4~g}<extra></extra>",
    )
    if len(parts[0]) == 1:
        return [median]
    edge = {"width": 0, "color": INK}
    low = go.Scatter(x=x, y=lowest, mode="lines", line=edge, hovertemplate="smallest %{y:.4~g}<extra></extra>")
    high = go.Scatter(
        x=x,
        y=highest,
        mode="lines",
        line=edge,
        fill="tonexty",
        fillcolor=_BAND,
        hovertemplate="largest %{y:.4~g}<extra></extra>",
    )
    return [low, high, median]
