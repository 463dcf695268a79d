"""Show the time of a recorded run by phase and by layer.

Without RUN, the newest run in torchotel-runs/ is shown. A layer's self time excludes the layers inside it.

The folder of a run with several ranks has a folder for each rank: RUN/rank0, RUN/rank1 and so on. With RUN, the ranks
are compared, and a rank that the others wait for is named. The other tables are those of the lowest rank. With
RUN/rank1, that rank is shown alone.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchotel._utils.text import printable
from torchotel.cli.run import RUNS
from torchotel.cli.terminal import Terminal, layers_to_show
from torchotel.runs import Run, RunError, open_run, render, summarise
from torchotel.runs.rank_folders import (
    MAX_NAMED_RUNS,
    last_change,
    later_runs,
    names_rank,
    newest_in,
    open_ranks,
    rank_of,
    sibling_ranks,
    world_size,
)
from torchotel.runs.slow_rank import compare_ranks
from torchotel.runs.tables import render_ranks

RUN_HELP = "run folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help=RUN_HELP)
    parser.add_argument("--top", type=layers_to_show, default=10, metavar="N", help="layers to show (default: 10)")


def call(arguments: argparse.Namespace) -> int:
    """Print the summary."""
    runs, output = chosen(arguments.run), Terminal()
    run, *others = runs
    if others:
        print(render_ranks(compare_ranks(runs), top=arguments.top, output=output), end="\n\n")
    if world_size(run) > 1:
        print(f"rank {rank_of(run)} of {world_size(run):,}")
    print(render(summarise(run.records(), run.spans()), run.info, top=arguments.top, output=output))
    for note in _notes(arguments.run, runs):
        print(f"\n{printable(note)}")
    return 0


def _notes(named: Path | None, runs: Sequence[Run]) -> Iterator[str]:
    """Yield where the runs were read from, if the name does not say it, and the later runs with this name."""
    missing = 0 if named and names_rank(named) else world_size(runs[0]) - len(runs)
    if len(runs) > 1 or missing > 0 or named is None:
        folders = [str(run.folder) for run in (runs if len(runs) == 1 else (runs[0], runs[-1]))]
        note = f"; missing there: {missing:,} of {world_size(runs[0]):,} ranks" if missing > 0 else ""
        yield f"read from {' … '.join(folders)}{note}"
    if named is not None:
        yield from later_in_words(named, [run.folder for run in runs])


def later_in_words(named: Path, folders: Sequence[Path]) -> Iterator[str]:
    """Yield a line that names the later runs which were to be recorded to a folder; nothing without such runs.

    Args:
        named: The folder that the command line names.
        folders: The folders that were read.
    """
    later = [str(path) for path in later_runs(named, folders)]
    if later:
        shown = ", ".join(later) if len(later) <= MAX_NAMED_RUNS else f"{later[0]} … {later[-1]}"
        yield f"later runs with this name: {shown}"


def chosen(run: Path | None) -> Sequence[Run]:
    """Open the run that the command line names, or else the newest run, with all of its ranks.

    Raises:
        RunError: There is no such run.
    """
    return open_ranks(run) if run else [open_run(folder) for folder in sibling_ranks(newest())]


def newest(runs: Path = RUNS) -> Path:
    """Return the run folder that was modified last.

    Raises:
        RunError: There is no run folder.
    """
    folders = [newest for folder in runs.glob("*") if (newest := newest_in(folder))]
    if not folders:
        raise RunError(f"{runs}: no run found; name a run folder")
    return max(folders, key=last_change)
