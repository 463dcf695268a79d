"""Variables and links of each dashboard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import table

from tools.dashboards.panels import SOURCE
from tools.dashboards.queries import series

TAG = "torchotel"
Rows = Mapping[str, Sequence[Builder[models.Panel]]]
"""Panels by the title of their row."""
GPU = "GPU"
"""The collapsed last row, whose panels are empty without a GPU."""

_ALL = models.VariableOption(text="All", value="$__all")


def chosen(name: str, values: str, description: str) -> dashboard.QueryVariable:
    """Return a variable with multiple selection."""
    variable = dashboard.QueryVariable(name).label(name.title()).description(description).query(values)
    variable = variable.datasource(SOURCE).refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    variable = variable.sort(models.VariableSort.NATURAL_ASC).multi(multi=True).include_all(include_all=True)
    return variable.all_value(".+").current(_ALL)


def framed(
    uid: str, title: str, description: str, rows: Rows, *more: Builder[models.VariableModel]
) -> models.Dashboard:
    """Make a dashboard.

    Args:
        uid: Id in the address, which links use.
        title: Title of the dashboard.
        description: Purpose of the dashboard.
        rows: Panels by row.
        more: Variables in addition to those of all dashboards.
    """
    made = dashboard.Dashboard(title).uid(uid).description(description).tags([TAG]).readonly()
    made = made.time("now-30m", "now").refresh("10s").timezone("browser")
    made = made.tooltip(models.DashboardCursorSync.CROSSHAIR).link(_others())
    for variable in (*_variables(), *more):
        made = made.with_variable(variable)
    for name, panels in rows.items():
        row = dashboard.Row(name)
        if name == GPU:
            for panel in panels:
                row = row.with_panel(panel)
            made = made.with_row(row)
            continue
        made = made.with_row(row)
        for panel in panels:
            made = made.with_panel(panel)
    built = made.build()
    for number, panel_or_row in enumerate(_all(built), 1):
        panel_or_row.id_val = number
        if isinstance(panel_or_row, models.Panel) and isinstance(panel_or_row.options, table.Options):
            panel_or_row.options.footer = None  # the library always writes it, and Grafana 12.2 removed it
    return built


def _all(built: models.Dashboard) -> Iterator[models.Panel | models.RowPanel]:
    for panel_or_row in built.panels or ():
        yield panel_or_row
        if isinstance(panel_or_row, models.RowPanel):
            yield from panel_or_row.panels


def _variables() -> list[Builder[models.VariableModel]]:
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    process, of_run = series("target_info"), series("target_info", 'torch_run_id=~"$run"')
    return [
        source.description("The Prometheus that scrapes the runs."),
        chosen("job", 'label_values(target_info{torch_run_id!=""}, job)', "The program, by its service.name."),
        chosen("run", f"label_values({process}, torch_run_id)", "One start of the program, on all of its ranks."),
        chosen("rank", f"label_values({of_run}, torch_rank)", "The processes of a run."),
    ]


def _others() -> dashboard.DashboardLink:
    links = dashboard.DashboardLink("torchotel").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    return links.as_dropdown(as_dropdown=False).include_vars(include_vars=True).keep_time(keep_time=True)
