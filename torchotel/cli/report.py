"""Write one HTML page of a recorded run: times, gradient norms, the slowest step, logged values and advice.

Without RUN, the newest run in torchotel-runs/ is used. The page is self-contained and opens without a network.
"""

import argparse
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

from torchotel._utils.text import printable
from torchotel.cli.summary import newest
from torchotel.cli.terminal import Progress, add_force, atomic_file
from torchotel.runs import open_run

_DRAWING_SHARE = 0.2
"""Share of drawing in the time of a long run's report; the rest is reading."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="the page (default: <name of RUN>.html here)")
    add_force(parser)


def call(arguments: argparse.Namespace) -> int:
    """Write the page and print its path; return 1 if plotly is missing."""
    if importlib.util.find_spec("plotly") is None:
        print("the report needs plotly: pip install plotly", file=sys.stderr)
        return 1
    folder = arguments.run or newest()
    output = arguments.output or Path(f"{folder.resolve().name}.html")
    with atomic_file(output, force=arguments.force) as file:
        page = _page(folder).encode()
        file.write(page)
    print(printable(f"{output}: {len(page) / 1e6:.1f} MB, opens in any browser"))
    return 0


def _page(folder: Path) -> str:
    from torchotel.runs import html  # noqa: PLC0415 - loads plotly, which only this command needs

    run = open_run(folder)
    size_bytes = run.size_bytes
    drawing = int(size_bytes * _DRAWING_SHARE)
    with Progress(size_bytes + drawing) as progress:
        progress.begin(f"reading {folder.name}")
        content = html.gather(replace(run, on_read=progress.advance))
        progress.begin("drawing")
        return html.document(content, lambda: progress.advance(drawing // len(html.SECTIONS)))
