"""Dashboards against the types that Grafana has of them, from its own npm package."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from support.grafana_dashboards import FILES, dashboard

from tools.dashboard_pictures.browser import MODULES

pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="there is no node on the path"),
    pytest.mark.skipif(not MODULES.is_dir(), reason="Grafana's components are not installed: see CONTRIBUTING.md"),
]


def check(*boards: Path) -> subprocess.CompletedProcess[str]:
    command = ["node", str(MODULES.parent / "schema.mjs"), *map(str, boards)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.program
def test_every_panel_has_options_that_grafana_knows() -> None:
    """Grafana drops what it does not know without a word."""
    done = check(*FILES)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.program
def test_an_unknown_option_and_a_bad_value_are_found(tmp_path: Path) -> None:
    """So the claim above can fail."""
    made = next(made for made in map(dashboard, FILES) if made["title"].endswith("Layers"))
    table = next(panel for panel in made["panels"] if panel["type"] == "table")
    graph = next(panel for panel in made["panels"] if panel["type"] == "timeseries")
    table["options"]["footer"] = {"show": False}
    graph["fieldConfig"]["defaults"]["custom"]["lineWidth"] = "wide"
    board = tmp_path / "board.json"
    board.write_text(json.dumps(made))
    done = check(board)
    assert done.returncode == 1
    assert f"board.json: options of {table['title']}:" in done.stdout
    assert f"board.json: fields of {graph['title']}: /lineWidth must be number" in done.stdout
