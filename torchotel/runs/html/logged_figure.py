"""Figure: what the program logged, and the norm of all gradients, over the steps."""

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from torchotel.runs.html.data import Content, chunks, middle, spread
from torchotel.runs.html.style import INK, Section, figure, rounded, shown

_POINTS = 400
_ROW_PX = 170
_BAND = "rgba(31,41,51,0.14)"


def section(content: Content) -> Section | None:
    """Draw one small figure for each name, or nothing where nothing was logged."""
    found = [name for name in content.series.logged_in_order() if content.series.logged[name][0]]
    if not found:
        return None
    columns = min(len(found), 3)
    rows = -(-len(found) // columns)
    grid = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[f"<b>{shown(name, 32)}</b>" for name in found],
        horizontal_spacing=0.07,
        vertical_spacing=0.34 / rows,
    )
    cut = False
    for place, name in enumerate(found):
        numbers, values = content.series.logged[name]
        cut = cut or len(numbers) > _POINTS
        row, column = place // columns + 1, place % columns + 1
        for trace in _line(numbers, values):
            grid.add_trace(trace, row=row, col=column)
        if min(values) == max(values) != 0:  # plotly would go from one below to one above
            grid.update_yaxes(range=sorted((values[0] * 0.5, values[0] * 1.5)), row=row, col=column)
    made = figure(grid.data, rows * _ROW_PX + 50, showlegend=False, hovermode="x")
    for axis in grid.layout:
        if axis.startswith(("xaxis", "yaxis")):
            made.update_layout({axis: grid.layout[axis].to_plotly_json()})
    made.update_layout(annotations=[note.to_plotly_json() for note in grid.layout.annotations])
    made.update_annotations(font={"size": 12})
    lead = "What the program logged, and the L2 norm of all gradients before clipping, by step."
    if cut:
        lead += " A line is the median of steps in a row, its band their smallest and largest."
    return Section("logged", "Loss and what else was logged", lead, made)


def _line(numbers: Sequence[int], values: Sequence[float]) -> Sequence[go.Scatter]:
    parts = list(chunks(range(len(numbers)), _POINTS))
    x = [numbers[part[len(part) // 2]] for part in parts]
    lowest, highest, typical = (
        [rounded(spread(values[part[0] : part[-1] + 1], pick)) for part in parts] for pick in (min, max, middle)
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
