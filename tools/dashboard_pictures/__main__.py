"""Draw every dashboard of every scenario and check the pictures: `make dashboard-pictures`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from PIL import Image
from support.prometheus_server import Prometheus, binary

from tools.dashboard_pictures.browser import MODULES, Problem, bundle, draw
from tools.dashboard_pictures.recorded import recorded
from tools.dashboard_pictures.scenarios import SCENARIOS, Scenario, scraped
from tools.dashboards.generated import FOLDER

BOARDS = sorted((FOLDER / "dashboards").glob("*.json"))
_PAGES = {
    "torchotel-training-one-1600-dark": "dashboard-training",
    "torchotel-layers-one-1600-dark": "dashboard-layers",
    "torchotel-ranks-four-ranks-1600-dark": "dashboard-ranks",
    "torchotel-telemetry-one-1600-light": "dashboard-telemetry",
}
"""The pictures of the pages, and their names there."""
_IMAGES = Path(__file__).parents[2] / "docs" / "images"
_PAGE_WIDTH = 1200
WIDTHS, THEMES = (1600, 1100), ("dark", "light")


def main() -> int:
    """Draw the pictures and print problems. Return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="make dashboard-pictures", description=__doc__)
    parser.add_argument("--to", type=Path, default=Path("dashboard-pictures"), help="folder for the pictures")
    parser.add_argument("--seconds", type=int, default=120, help="duration of the training and of the time range")
    parser.add_argument("--scenario", choices=[one.name for one in SCENARIOS], action="append", help="only this one")
    parser.add_argument("--board", choices=[path.stem for path in BOARDS], action="append", help="only this one")
    parser.add_argument("--pages", action="store_true", help="also write the pictures of docs/")
    chosen = parser.parse_args()
    if missing := _missing():
        parser.error(missing)
    scenarios = [one for one in SCENARIOS if chosen.scenario is None or one.name in chosen.scenario]
    boards = [path for path in BOARDS if chosen.board is None or path.stem in chosen.board]
    with tempfile.TemporaryDirectory() as scratch, scraped(scenarios, Path(scratch)) as prometheus:
        time.sleep(chosen.seconds)  # the range fills with values
        found = [*pictures(prometheus, scenarios, boards, chosen.to, chosen.seconds)]
    if chosen.pages:
        _write_pages(chosen.to)
    for picture, problem in found:
        print(f"{picture}: {problem.panel}: {problem.problem}: {problem.details}")
    return 1 if found else 0


def pictures(
    prometheus: Prometheus, scenarios: Sequence[Scenario], boards: Sequence[Path], folder: Path, span_s: int
) -> Iterator[tuple[str, Problem]]:
    """Draw each board of each scenario in every width and theme into a folder; yield the problems by picture."""
    folder.mkdir(parents=True, exist_ok=True)
    end_s = time.time() - 1
    with tempfile.TemporaryDirectory() as bundled:
        bundle(Path(bundled))
        for scenario, path, width in product(scenarios, boards, WIDTHS):
            board = json.loads(path.read_text(encoding="utf-8"))
            data = recorded(prometheus, board, scenario.name, end_s, span_s, width)
            for theme in THEMES:
                picture = (folder / f"{path.stem}-{scenario.name}-{width}-{theme}.png").absolute()
                for problem in draw(data, picture, Path(bundled), width=width, theme=theme):
                    if problem.problem != "empty" or problem.panel not in scenario.may_be_empty:
                        yield picture.name, problem


def _write_pages(folder: Path) -> None:
    """Write the pictures of the pages, smaller and with 256 colours."""
    for drawn, page in _PAGES.items():
        with Image.open(folder / f"{drawn}.png") as picture:
            height = picture.height * _PAGE_WIDTH // picture.width
            smaller = picture.convert("RGB").resize((_PAGE_WIDTH, height), Image.Resampling.LANCZOS)
        # The median cut, which is the default, turns thin coloured lines grey; k-means keeps the backgrounds exact.
        few = smaller.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=4, dither=Image.Dither.NONE)
        few.save(_IMAGES / f"{page}.png", optimize=True)


def _missing() -> str | None:
    if shutil.which("chromium") is None or shutil.which("node") is None:
        return "Node and Chromium are needed on the path; install them"
    if not MODULES.is_dir():
        return "Grafana's components are not installed; run make dashboard-pictures"
    return None if binary() else "there is no Prometheus; run make backends"


if __name__ == "__main__":
    sys.exit(main())
