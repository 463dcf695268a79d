"""A dashboard drawn by Grafana's own components from a real Prometheus that scrapes a real training."""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import browser
from support.grafana_dashboards import FILES, dashboard
from support.prometheus_server import Prometheus, binary, until

from tools.dashboard_pictures import browser as page
from tools.dashboard_pictures.__main__ import pictures
from tools.dashboard_pictures.browser import MODULES
from tools.dashboard_pictures.scenarios import SCENARIOS, scraped

SPAN_S = 20
(NUMERIC,) = [one for one in SCENARIOS if one.name == "numeric"]
(LAYERS,) = [path for path in FILES if path.stem == "torchotel-layers"]
pytestmark = [
    pytest.mark.skipif(browser.BINARY is None, reason=browser.SKIPPED),
    pytest.mark.skipif(binary() is None, reason="there is no prometheus, neither built nor on the path"),
    pytest.mark.skipif(shutil.which("node") is None, reason="there is no node on the path"),
    pytest.mark.skipif(not MODULES.is_dir(), reason="Grafana's components are not installed: see CONTRIBUTING.md"),
]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with scraped([NUMERIC], tmp_path_factory.mktemp("run")) as server:
        until(lambda: server.query("torch_steps_total > 100"), bool)
        yield server


def found(prometheus: Prometheus, board: Path, folder: Path) -> set[tuple[str, str]]:
    return {(one.panel, one.problem) for _, one in pictures(prometheus, [NUMERIC], [board], folder, SPAN_S)}


@pytest.mark.real_server
def test_a_dashboard_is_readable(prometheus: Prometheus, tmp_path: Path) -> None:
    """In both widths and themes; the pictures are there."""
    assert found(prometheus, LAYERS, tmp_path) == set()
    assert len([*tmp_path.glob("torchotel-layers-numeric-*.png")]) == 4


@pytest.mark.real_server
def test_a_graph_that_the_browser_did_not_paint_is_found(
    prometheus: Prometheus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "_PAGE", page._PAGE.replace("<style>", "<style>canvas {{ visibility: hidden }} "))
    graphs = {panel["title"] for panel in dashboard(LAYERS)["panels"] if panel["type"] == "timeseries"}
    blank = {panel for panel, problem in found(prometheus, LAYERS, tmp_path) if problem == "not painted"}
    assert blank == graphs - NUMERIC.may_be_empty


@pytest.mark.real_server
def test_what_is_not_readable_is_found(prometheus: Prometheus, tmp_path: Path) -> None:
    """Labels with a unit, a cell, a title and a legend cut, a column out of view, small text, no data."""
    made = copy.deepcopy(dashboard(LAYERS))
    by_title = {panel["title"]: panel for panel in made["panels"]}
    table, graph, low = (by_title[title] for title in ("Slowest layers", "Watched tensors", "Forward by layer"))
    number = next(
        panel for path in FILES for panel in dashboard(path)["panels"] if panel["title"] == "Since the last step"
    )
    cut, wide, small, empty = (copy.deepcopy(one) for one in (table, table, number, graph))
    rename(cut, "cut", width=20)
    rename(wide, "wide", width=2000)
    rename(small, "small " * 40)
    small["options"]["text"] = {"valueSize": 6}
    rename(empty, "nothing")
    empty["targets"][0]["expr"] = 'vector(0) and on () target_info{job="none"}'
    del table["fieldConfig"]["overrides"]
    made["panels"] = [table, cut, wide, small, empty, low]
    for number_of, panel in enumerate(made["panels"]):
        panel["id"], panel["gridPos"] = number_of, {"x": 0, "y": 8 * number_of, "w": 24, "h": 8}
    small["gridPos"]["w"] = 3
    low["gridPos"]["h"] = 3
    board = tmp_path / "broken.json"
    board.write_text(json.dumps(made))
    problems = {(panel.strip(), problem) for panel, problem in found(prometheus, board, tmp_path)}
    expected = {
        ("Slowest layers", "label with a unit"),
        ("cut", "cells cut"),
        ("wide", "columns out of view"),
        (("small " * 40).strip(), "title cut"),
        (("small " * 40).strip(), "text too small"),
        ("nothing", "empty"),
        ("Forward by layer", "legend cut"),
    }
    assert expected <= problems


def rename(panel: dict[str, Any], title: str, width: int | None = None) -> None:
    """Give a panel another title, and the column of modules another width in pixels."""
    panel["title"] = title
    for override in panel["fieldConfig"]["overrides"] if width else ():
        if override["matcher"]["options"] == "module":
            override["properties"] = [{"id": "custom.width", "value": width}]
