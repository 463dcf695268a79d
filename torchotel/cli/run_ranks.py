"""Run a program on several ranks of this host: `torchotel run --nproc-per-node 4 train.py`."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torchotel._utils.text import printable
from torchotel.cli.options import flag_of, options
from torchotel.cli.terminal import Terminal
from torchotel.runs import RunError
from torchotel.runs.rank_folders import open_ranks, rank_of
from torchotel.runs.slow_rank import compare_ranks
from torchotel.runs.tables import render_ranks

if TYPE_CHECKING:
    from types import FrameType

    from torchotel.cli.python_program import Program

TOP_RANKS = 10


def run_ranks(ranks: str, program: Program, arguments: argparse.Namespace, record: Path) -> int:
    """Run the program with torchrun, each rank under `torchotel run`; return torchrun's exit code.

    Args:
        ranks: Number of ranks, or another value of `--nproc-per-node` of torchrun, such as `gpu`.
        program: The program.
        arguments: The options of `torchotel run`.
        record: The name of the run folders, without the rank.
    """
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words += ["-m", "torchotel", "run", "--quiet", *_as_words(arguments), f"--record={record}"]
    words += ["-m"] if program.module else []
    process = subprocess.Popen([*words, program.target, *program.arguments])  # noqa: S603  # the program of the user

    def pass_on(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to torchrun, too, which ends the ranks
    code = process.wait()
    if not arguments.quiet:
        _show(record)
    return code


def _as_words(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the options of `torchotel run` as they were typed."""
    for name in options():
        value = getattr(arguments, name, None)
        if value is not None and name != "record":
            flag = flag_of(name)
            yield {True: flag, False: f"--no-{flag[2:]}"}[value] if isinstance(value, bool) else f"{flag}={value}"


def _show(record: Path) -> None:
    """Print the comparison of the ranks, and where they are recorded."""
    shown = record.relative_to(Path.cwd()) if record.is_relative_to(Path.cwd()) else record
    try:
        runs = open_ranks(record)
    except RunError as error:
        print(f"torchotel: nothing was recorded ({error})", file=sys.stderr)
        return
    name = printable(str(shown))
    print(f"\n{render_ranks(compare_ranks(runs), top=TOP_RANKS, output=Terminal())}\n" if len(runs) > 1 else "")
    print(f"recorded in {name}-rank0 to {name}-rank{rank_of(runs[-1])}" if len(runs) > 1 else f"recorded in {name}")
    print(f"  torchotel summary {name}    prints all tables")
    print(f"  torchotel report {name}     writes one HTML page of them")
