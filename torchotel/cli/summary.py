"""Show the time of a recorded run by phase and by layer.

Without RUN, the newest run in torchotel-runs/ is shown. A layer's self time excludes the layers inside it.
"""

import argparse
from pathlib import Path

from torchotel._utils.text import printable
from torchotel.cli.run import RUNS
from torchotel.cli.terminal import Terminal, layers_to_show
from torchotel.runs import RunError, open_run, render, summarise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--top", type=layers_to_show, default=10, metavar="N", help="layers to show (default: 10)")


def call(arguments: argparse.Namespace) -> int:
    """Print the summary."""
    folder = arguments.run or newest()
    run = open_run(folder)
    print(render(summarise(run.records(), run.spans()), run.info, top=arguments.top, output=Terminal()))
    if arguments.run is None:
        print(f"\nread from {printable(str(folder))}")
    return 0


def newest(runs: Path = RUNS) -> Path:
    """Return the run folder that was modified last.

    Raises:
        RunError: There is no run folder.
    """
    folders = [path.parent for path in runs.glob("*/metrics.jsonl")]
    if not folders:
        raise RunError(f"{runs}: no run found; name a run folder")
    return max(folders, key=lambda folder: (folder.stat().st_mtime_ns, folder.name))
