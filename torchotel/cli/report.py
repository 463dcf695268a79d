"""Write one HTML page of a recorded run: times, gradient norms, the slowest step, logged values and advice.

Without RUN, the newest run in torchotel-runs/ is used. The page is self-contained and opens without a network.

If RUN has several ranks, the page compares the ranks. The other parts of the page are those of the lowest rank.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torchotel._utils.text import printable
from torchotel.cli.summary import RUN_HELP, chosen
from torchotel.cli.terminal import Progress, add_force, atomic_file
from torchotel.runs import Run
from torchotel.runs.rank_folders import run_name

_DRAWING_SHARE = 0.2
"""Share of drawing in the time of a long run's report; the rest is reading."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help=RUN_HELP)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="the page (default: <name of RUN>.html here)")
    add_force(parser)


def call(arguments: argparse.Namespace) -> int:
    """Write the page and print its path; return 1 if plotly is missing."""
    if importlib.util.find_spec("plotly") is None:
        print("the report needs plotly: pip install plotly", file=sys.stderr)
        return 1
    runs = chosen(arguments.run)
    output = arguments.output or Path(f"{run_name(runs)}.html")
    with atomic_file(output, force=arguments.force) as file:
        page = _page(runs).encode()
        file.write(page)
    print(printable(f"{output}: {len(page) / 1e6:.1f} MB, opens in any browser"))
    return 0


def _page(runs: Sequence[Run]) -> str:
    from torchotel.runs import html  # noqa: PLC0415 - loads plotly, which only this command needs

    size_bytes = sum(run.size_bytes for run in runs)
    drawing = int(size_bytes * _DRAWING_SHARE)
    with Progress(size_bytes + drawing) as progress:
        progress.begin(f"reading {run_name(runs)}")
        content = html.gather(*(replace(run, on_read=progress.advance) for run in runs))
        progress.begin("drawing")
        return html.document(content, lambda: progress.advance(drawing // len(html.SECTIONS)))
