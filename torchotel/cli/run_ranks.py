"""Run a program on several ranks of this host: `torchotel run --nproc-per-node 4 train.py`."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from torchotel._utils.text import printable
from torchotel.cli.options import flag_of, options
from torchotel.cli.terminal import Terminal
from torchotel.runs.rank_folders import run_folder, sibling_ranks
from torchotel.runs.reader import holds_run, open_run
from torchotel.runs.slow_rank import compare_ranks
from torchotel.runs.tables import render_ranks

if TYPE_CHECKING:
    from types import FrameType

    from torchotel.cli.python_program import Program

TOP_RANKS = 10
KINDS = "auto", "cpu", "gpu", "xpu"
"""Values of `--nproc-per-node` of torchrun that are no number."""


def run_ranks(ranks: str, program: Program, arguments: argparse.Namespace, record: Path) -> int:
    """Run the program with torchrun, each rank under `torchotel run`; return torchrun's exit code, or 2 if it cannot.

    Args:
        ranks: Number of ranks, or another value of `--nproc-per-node` of torchrun, such as `gpu`.
        program: The program.
        arguments: The options of `torchotel run`.
        record: The run folder.
    """
    if ranks not in KINDS and not (ranks.isdecimal() and int(ranks)):
        return _refuse(f"--nproc-per-node takes a number of ranks or one of {', '.join(KINDS)}, not {ranks!r}")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _refuse("a launcher has started this process as a rank (RANK is set); leave out --nproc-per-node")
    is_new = not record.exists()
    with TemporaryDirectory() as notes:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        words += ["-m", "torchotel", "run", "--quiet", *_as_words(arguments), f"--record={record}"]
        words += [f"--note-folder-in={notes}", *(["-m"] if program.module else [])]
        process = subprocess.Popen([*words, program.target, *program.arguments])  # noqa: S603  # no shell; the user typed them

        def pass_on(number: int, _: FrameType | None) -> None:
            process.send_signal(number)

        signal.signal(signal.SIGTERM, pass_on)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to torchrun, too, which ends the ranks
        code = process.wait()
        folders = [Path(note.read_text()) for note in Path(notes).iterdir()]
    if is_new:
        with suppress(OSError):  # the ranks have recorded there
            record.rmdir()
    if not arguments.quiet:
        _show(folders)
    return code


def _refuse(problem: str) -> int:
    print(f"torchotel run: {problem}", file=sys.stderr)
    return 2


def _as_words(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the options of `torchotel run` as they were typed."""
    for name in options():
        value = getattr(arguments, name, None)
        if value is not None and name != "record":
            flag = flag_of(name)
            yield {True: flag, False: f"--no-{flag[2:]}"}[value] if isinstance(value, bool) else f"{flag}={value}"


def _show(folders: Sequence[Path]) -> None:
    """Print the comparison of the ranks, and where they are recorded.

    Args:
        folders: The folders that the ranks have noted; a rank that records to the same run may have noted none.
    """
    recorded = [folder for folder in folders if holds_run(folder)]
    if not recorded:
        print("torchotel: no rank has trained or evaluated, so nothing was recorded", file=sys.stderr)
        return
    runs = [open_run(folder) for folder in sibling_ranks(recorded[0])]
    names = [printable(str(_shown(run.folder))) for run in runs]
    print(f"\n{render_ranks(compare_ranks(runs), top=TOP_RANKS, output=Terminal())}\n" if len(runs) > 1 else "")
    print(f"recorded in {f'{names[0]} … {names[-1]}' if len(runs) > 1 else names[0]}")
    name = printable(str(_shown(run_folder(runs[0].folder) if len(runs) > 1 else runs[0].folder)))
    print(f"  torchotel summary {name}    prints all tables")
    print(f"  torchotel report {name}     writes one HTML page of them")


def _shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
