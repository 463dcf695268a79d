"""Panels of all dashboards; each has a unit and a description."""

from __future__ import annotations

from collections.abc import Iterable
from string import ascii_uppercase
from typing import NamedTuple, Protocol, Self, TypeVar

from grafana_foundation_sdk.builders import barchart, common, dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from tools.dashboards.queries import Query

SOURCE = models.DataSourceRef(type_val="prometheus", uid="$datasource")
WHOLE, HALF, THIRD = 24, 12, 8
"""Widths of a panel."""
_HEIGHT = 9
"""Height of a panel. Grafana's legend below takes up to 35 % of it, which is four lines: with 8, it cuts the fourth."""
_STAT_WIDTH, _STAT_HEIGHT = 6, 4
_ROWS_HEIGHT = 16
_NAME_PX, _VALUE_PX = 12, 18
_MANY_HEIGHT = 12
"""Height of a panel with a legend beside, whose head and 16 lines it shows; with 10, it cuts the fourteenth."""
_LEGEND_WIDTH = 260
_WIDTHS, _LEAST_WIDTH = {"module": 210, "type": 170}, 90
"""Pixels for the names of a layer and its class, and for other columns of a table, which share the rest."""
_POINTS = 200
"""Resolution of queries over the whole range: one point per pixel would be too expensive with many ranks."""
_SPARSE_MS = 300_000
_LEAST_TOP = {"/s": 1, "percentunit": 0.01}
"""Smallest maximum of an axis by the end of its unit: otherwise Grafana draws zeros up to 100 steps/s or 10,000 %."""
_BELOW_ALL = -1e9
"""Lower bound of the shown values of a heatmap. The default suits counts and hides negative values."""


class Column(NamedTuple):
    """A column of numbers in a table."""

    name: str
    unit: str
    expr: str


class _Panel(Protocol):
    """Interface of the library's panel builders."""

    def build(self) -> models.Panel: ...
    def title(self, title: str) -> Self: ...
    def description(self, description: str) -> Self: ...
    def unit(self, unit: str) -> Self: ...
    def datasource(self, datasource: models.DataSourceRef) -> Self: ...
    def targets(self, targets: list[Builder[Dataquery]]) -> Self: ...
    def decimals(self, decimals: float) -> Self: ...
    def span(self, w: int) -> Self: ...
    def height(self, h: int) -> Self: ...


_Kind = TypeVar("_Kind", bound=_Panel)


def per_second(noun: str) -> str:
    """Return Grafana's unit for a count per second, such as 12 K steps/s."""
    return f"count:{noun}/s"


def lines(
    title: str,
    unit: str,
    description: str,
    *queries: Query,
    width: int = HALF,
    log: bool = False,
    sparse: bool = False,
    many: bool = False,
) -> timeseries.Panel:
    """Draw values over time.

    Args:
        title: Title of the panel.
        unit: Unit, by Grafana's name.
        description: Meaning of the values.
        queries: Queries of the lines.
        width: Width of 24 columns.
        log: Draw on a logarithmic axis.
        sparse: Draw lines across gaps of some minutes, for events that are rarer than the query's points.
        many: Place the legend at the side, for ten series or more.
    """
    panel = _framed(timeseries.Panel(), title, unit, description, width).targets(_targets(queries))
    panel = panel.legend(_legend_beside() if many else _legend()).tooltip(_tooltip())
    panel = panel.mappings([_NAN]) if many else panel
    panel = panel.height(_MANY_HEIGHT if many else _HEIGHT).span_nulls(_SPARSE_MS if sparse else False)
    for end, top in _LEAST_TOP.items():
        panel = panel.axis_soft_min(0).axis_soft_max(top) if unit.endswith(end) else panel
    return panel.scale_distribution(_log_scale()) if log else panel


def stacked(title: str, unit: str, description: str, *queries: Query, width: int = HALF) -> timeseries.Panel:
    """Draw values over time as parts of a whole."""
    panel = lines(title, unit, description, *queries, width=width).fill_opacity(60).line_width(0).axis_soft_min(0)
    return panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))


def number(title: str, unit: str, description: str, query: Query, **limits: float) -> stat.Panel:
    """Show the latest value, in a colour if it exceeds a limit.

    Args:
        title: Title of the panel.
        unit: Unit, by Grafana's name.
        description: Meaning of the values.
        query: Query of the value.
        limits: Lowest value of each colour, by the colour's name.
    """
    steps = [models.Threshold(color="green"), *(models.Threshold(value=at, color=name) for name, at in limits.items())]
    panel = _framed(stat.Panel(), title, unit, description, _STAT_WIDTH).height(_STAT_HEIGHT)
    # One line for each run: in columns, the names of four runs would have 6 px. There is no room for a line chart.
    panel = panel.orientation(common_models.VizOrientation.HORIZONTAL).graph_mode(common_models.BigValueGraphMode.NONE)
    panel = panel.text(common.VizTextDisplayOptions().title_size(_NAME_PX).value_size(_VALUE_PX))
    # Not instant: only the series of a query over a range are sorted, so that all panels list runs in the same order.
    panel = panel.targets([_target("A", query)]).thresholds(dashboard.ThresholdsConfig().steps(steps))
    return panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))


def histogram(title: str, unit: str, description: str, query: Query, width: int = HALF) -> heatmap.Panel:
    """Draw the buckets of a histogram over time."""
    target = _target("A", query).format(PromQueryFormat.HEATMAP)
    panel = _framed(heatmap.Panel(), title, unit, description, width).targets([target])
    return panel.calculate(calculate=False).y_axis(heatmap.YAxisConfig().unit(unit)).color(_colours())


def rows(
    title: str, unit: str, description: str, query: Query, *, low: float, high: float, empty: str | None = None
) -> heatmap.Panel:
    """Draw a row of colours for each series of a run over time, from the top in the order of their labels as text.

    Each run has a separate panel.

    Args:
        title: Title of the panel.
        unit: Unit, by Grafana's name.
        description: Meaning of the values.
        query: Query of the values, which may be negative.
        low: Values up to this one have the first colour.
        high: Values from this one on have the last colour.
        empty: Text of a panel without rows, if that is usual.
    """
    panel = _framed(heatmap.Panel(), title, unit, description, WHOLE).height(_ROWS_HEIGHT)
    panel = panel.targets(_targets([query])).calculate(calculate=False).color(_colours().min(low).max(high))
    panel = panel.filter_values(heatmap.FilterValueRange().le(_BELOW_ALL))
    panel = panel.cell_values(heatmap.CellValues().unit(unit))
    panel = panel.no_value(empty) if empty else panel
    panel = panel.y_axis(heatmap.YAxisConfig().axis_width(200).reverse(reverse=True))
    return panel.repeat("run").max_per_row(1)


def listed(
    title: str,
    description: str,
    *columns: Column,
    width: int = HALF,
    ascending: bool = False,
    empty: str | None = None,
) -> table.Panel:
    """List values of the whole range, one row for each set of labels, sorted by the first column.

    Args:
        title: Title of the panel.
        description: Meaning of the values.
        columns: Columns of numbers.
        width: Width of 24 columns.
        ascending: Sort by the smallest value first.
        empty: Text of a table without rows, if that is usual.
    """
    queries = [
        _target(name, Query(column.expr)).instant().format(PromQueryFormat.TABLE)
        for name, column in zip(ascii_uppercase, columns, strict=False)
    ]
    values = {f"Value #{name}": column.name for name, column in zip(ascii_uppercase, columns, strict=False)}
    order = [*_FIRST, *values, *_LAST]
    shown = {
        "excludeByName": {"Time": True},
        "indexByName": {name: place for place, name in enumerate(order)},
        "renameByName": {**values, **_LABELS},
    }
    panel = (
        _framed(table.Panel(), title, columns[0].unit, description, width)
        .targets([*queries])
        .max_data_points(_POINTS)
        .min_width(_LEAST_WIDTH)
        .transformations(
            [models.DataTransformerConfig("merge", options={}), models.DataTransformerConfig("organize", options=shown)]
        )
        .override_by_field_type("string", _AS_IT_IS)
    )
    panel = panel.no_value(empty) if empty else panel
    for column in columns:
        panel = panel.override_by_name(column.name, _unit(column.unit))
    for label, pixels in _WIDTHS.items():
        panel = panel.override_by_name(label, [models.DynamicConfigValue("custom.width", pixels)])
    return panel.sort_by([common.TableSortByFieldState().display_name(columns[0].name).desc(desc=not ascending)])


def bars(title: str, unit: str, description: str, expr: str, x: str, parts: str, width: int = WHOLE) -> barchart.Panel:
    """Draw values of the whole range as stacked bars.

    Args:
        title: Title of the panel.
        unit: Unit, by Grafana's name.
        description: Meaning of the values.
        expr: Expression of the values.
        x: Label of the bars.
        parts: Label of the parts of a bar.
        width: Width of 24 columns.
    """
    matrix = {"rowField": x, "columnField": parts, "valueField": "Value"}
    panel = _framed(barchart.Panel(), title, unit, description, width)
    panel = panel.targets([_target("A", Query(expr)).instant().format(PromQueryFormat.TABLE)])
    panel = panel.max_data_points(_POINTS).override_by_field_type("string", _AS_IT_IS)
    panel = panel.with_transformation(models.DataTransformerConfig("groupingToMatrix", options=matrix))
    return panel.x_field(f"{x}\\{parts}").stacking(common_models.StackingMode.NORMAL).legend(_legend())


_LABELS = {
    "torch_run_id": "run",
    "torch_rank": "rank",
    "host_name": "host",
    "torch_model": "model",
    "torch_module_path": "module",
    "torch_module_type": "type",
    "torch_direction": "direction",
}
"""Names of columns by labels."""
_FIRST = ("torch_module_path", "torch_module_type", "torch_direction", "torch_rank", "host_name")
_LAST = ("torch_model", "torch_run_id")
"""Labels before and after the numbers of a table; the subject of a row is first."""
_DECIMALS = {"sci": 2}
"""Decimals of units that Grafana shows with all digits."""
_AS_IT_IS = [models.DynamicConfigValue("unit", "string")]
"""Unit of labels: the unit of a panel also formats text that looks like a number, such as the module 0."""
_NAN = models.SpecialValueMap(
    models.DashboardSpecialValueMapOptions(
        match=models.SpecialValueMatch.NULL_AND_NAN, result=models.ValueMappingResult(text="NaN")
    )
)
"""Text of a last value that is NaN. Grafana draws lines without it, as a gap."""


def _unit(unit: str) -> list[models.DynamicConfigValue]:
    properties = [models.DynamicConfigValue("unit", unit)]
    return [*properties, models.DynamicConfigValue("decimals", _DECIMALS[unit])] if unit in _DECIMALS else properties


def _framed(panel: _Kind, title: str, unit: str, description: str, width: int) -> _Kind:
    framed = panel.title(title).unit(unit).description(description)
    framed = framed.decimals(_DECIMALS[unit]) if unit in _DECIMALS else framed
    return framed.datasource(SOURCE).span(width).height(_HEIGHT)


def _targets(queries: Iterable[Query]) -> list[Builder[Dataquery]]:
    return [_target(name, query) for name, query in zip(ascii_uppercase, queries, strict=False)]


def _target(name: str, query: Query) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(name).datasource(SOURCE).expr(query.expr).legend_format(query.legend)
    return target.exemplar(exemplar=True).range() if query.exemplars else target.range()


def _legend() -> common.VizLegendOptions:
    legend = common.VizLegendOptions().display_mode(common_models.LegendDisplayMode.LIST).show_legend(show_legend=True)
    return legend.placement(common_models.LegendPlacement.BOTTOM)


def _legend_beside() -> common.VizLegendOptions:
    legend = _legend().display_mode(common_models.LegendDisplayMode.TABLE).calcs(["last"])
    return legend.placement(common_models.LegendPlacement.RIGHT).width(_LEGEND_WIDTH)


def _tooltip() -> common.VizTooltipOptions:
    many = common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI)
    return many.sort(common_models.SortOrder.DESCENDING)


def _log_scale() -> common.ScaleDistributionConfig:
    return common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LOG).log(10)


def _colours() -> heatmap.HeatmapColorOptions:
    return heatmap.HeatmapColorOptions().mode(heatmap_models.HeatmapColorMode.SCHEME).scheme("Turbo").steps(64)
