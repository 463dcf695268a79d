"""Grafana's queries for a dashboard with the responses of Prometheus, for the page that draws it."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from support.prometheus_server import Prometheus

from tools.dashboard_pictures.scenarios import SCRAPE_S

_STEPS_S = (1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1200, 1800, 3600)
"""The intervals that Grafana rounds to (rangeUtil.roundInterval), from a second to an hour."""
_COLUMNS = 24
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_ALL = ".+"


def recorded(
    prometheus: Prometheus, board: Mapping[str, Any], job: str, end_s: float, span_s: int, width: int
) -> dict[str, Any]:
    """Query the data of every panel as Grafana does; return the value of the page's window.DATA.

    Args:
        prometheus: The server.
        board: The dashboard.
        job: The value of the variable `job`; of the others, all values are chosen.
        end_s: The end of the time range, in seconds since 1970.
        span_s: The length of the range.
        width: Width of the window in pixels, which determines the distance of the points.
    """
    runs = prometheus.get("label/torch_run_id/values", **{"match[]": f'target_info{{job="{job}"}}'})
    panels = _repeated(board["panels"], runs)
    answers = {}
    for panel in panels:
        points = panel.get("maxDataPoints") or width * panel["gridPos"]["w"] // _COLUMNS
        step_s = max(SCRAPE_S, next(step for step in _STEPS_S if step >= span_s / points))
        known = {
            **{one["name"]: _ALL for one in board["templating"]["list"]},
            "job": job,
            "__interval": f"{step_s}s",
            "__rate_interval": f"{max(step_s + SCRAPE_S, 4 * SCRAPE_S)}s",
            "__range": f"{span_s}s",
            **panel.get("scopedVars", {}),
        }
        for target in panel.get("targets", ()):
            expr = _filled(target["expr"], known)
            if target.get("instant"):
                data = prometheus.get("query", query=expr, time=str(end_s))
            else:
                span = {"start": str((end_s - span_s) // step_s * step_s), "end": str(end_s // step_s * step_s)}
                data = prometheus.get("query_range", query=expr, step=str(step_s), **span)
            answers[f"{panel['id']}/{target['refId']}"] = {"step": step_s, "data": data}
    shown = {**board, "panels": panels}
    return {"dashboard": shown, "answers": answers, "from": (end_s - span_s) * 1000, "to": end_s * 1000}


def _filled(expr: str, known: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda found: known[found[1]], expr)


def _repeated(panels: Sequence[dict[str, Any]], runs: Sequence[str]) -> list[dict[str, Any]]:
    """Place a copy of each repeated panel for each run, as Grafana does, and move the panels below down."""
    laid_out: list[dict[str, Any]] = []
    down = 0
    for panel in copy.deepcopy([*panels]):
        at = panel["gridPos"]
        at["y"] += down
        if panel.get("repeat") != "run" or not runs:
            laid_out.append(panel)
            continue
        beside = min(len(runs), panel.get("maxPerRow", 4))
        for number, run in enumerate(runs):
            copied = copy.deepcopy(panel)
            line, place = divmod(number, beside)
            width = _COLUMNS // beside
            copied["gridPos"] = {"x": place * width, "y": at["y"] + line * at["h"], "w": width, "h": at["h"]}
            copied["id"] = f"{panel['id']}-{run}"
            copied["scopedVars"] = {"run": run}
            copied["title"] = panel["title"].replace("$run", run)
            laid_out.append(copied)
        down += (len(runs) - 1) // beside * at["h"]
    return laid_out
