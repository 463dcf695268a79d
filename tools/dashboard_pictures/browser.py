"""The page in a real browser without a network: its picture, and the problems that its script finds."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from support import browser

FOLDER = Path(__file__).parent
MODULES = FOLDER / "node_modules"
_TIMEOUT_S = 300
_CELL, _AROUND = 38, 70
"""Pixels of a row of Grafana's grid with its gap, and of the title and the margin."""
_LOCAL_FILES = "--allow-file-access-from-files"  # the icons, which are files in @grafana/ui
_PAGE = """<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="main.css">
<style>body {{ margin: 0; overflow: hidden }}</style><div id="root"></div>
<script>window.__grafana_public_path__ = "{icons}"; window.DATA = {data};</script><script src="main.js"></script>
"""


class Problem(NamedTuple):
    """A problem of a drawn panel."""

    panel: str
    problem: str
    details: str


def bundle(folder: Path) -> None:
    """Write the page's script and style into a folder."""
    subprocess.run(["node", str(FOLDER / "bundle.mjs"), str(folder)], check=True)  # noqa: S607  # node on the path


def draw(data: Mapping[str, Any], picture: Path, bundled: Path, *, width: int, theme: str) -> list[Problem]:
    """Draw a recorded dashboard into a PNG file; return its problems.

    Args:
        data: The dashboard with the responses of Prometheus.
        picture: The file.
        bundled: Folder of script and style, to which the page is written.
        width: Width of the window in pixels.
        theme: `dark` or `light`.

    Raises:
        RuntimeError: The check of the page did not finish.
    """
    page = bundled / "page.html"
    # "<" is escaped, so that no name of a run or a module ends the script.
    script = json.dumps(data).replace("<", "\\u003c")
    page.write_text(_PAGE.format(icons=f"{(MODULES / '@grafana/ui/dist/public').as_uri()}/", data=script))
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in data["dashboard"]["panels"])
    flags = [flag for flag in browser.FLAGS if flag != "--dump-dom"]
    size = f"--window-size={width},{rows * _CELL + _AROUND}"
    command = [
        browser.BINARY or "chromium", *flags, _LOCAL_FILES, "--hide-scrollbars", size, f"--screenshot={picture}",
        f"--user-data-dir={bundled / 'profile'}", f"{page.as_uri()}?theme={theme}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    found = [json.loads(report) for report in re.findall(r'"REPORT (.*)", source: ', done.stderr)]
    if {"done": True} not in found:
        raise RuntimeError(f"{picture.name} was not checked to its end; the browser wrote:\n{done.stderr[-3000:]}")
    problems = [Problem(one["panel"], one["problem"], one.get("details", "")) for one in found if "panel" in one]
    with Image.open(picture) as pixels:
        blank = [one["graph"] for one in found if "graph" in one and _is_blank(pixels, *one["box"])]
    return problems + [Problem(graph, "not painted", "draw it again, with nothing beside it") for graph in blank]


def _is_blank(pixels: Image.Image, left: float, top: float, right: float, bottom: float) -> bool:
    """Return whether an area has one colour: not even an axis, since the browser did not paint the graph in time."""
    return pixels.crop((round(left), round(top), round(right), round(bottom))).getcolors(1) is not None
