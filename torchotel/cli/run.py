"""Run a script with every step a trace, then say where its time went.

    torchotel run train.py --epochs 3
    torchotel run -m package.train --epochs 3

The script runs as python itself would run it, and its exit code is passed on. Options of torchotel stand
before the script; all other settings are read from OTEL_* and TORCHOTEL_* variables. Processes that the
script starts are not instrumented. torch is imported before the script, so variables that torch reads at
its import (OMP_NUM_THREADS) must be set outside.
"""

import argparse
import sys
from typing import Any

from torchotel.cli.program import Program, is_runnable
from torchotel.cli.recording import run_recorded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = "%(prog)s [--record DIR] [--detail WHAT] [--endpoint URL] {SCRIPT | -m MODULE} [ARGS ...]"
    add_settings(parser)
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="script or module, and its own arguments")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Declare the settings that `run` and `demo` share."""
    parser.add_argument(
        "--record", metavar="DIR", help="folder of the run file (default: torchotel-runs/<time>-<name>)"
    )
    parser.add_argument(
        "--detail",
        metavar="WHAT",
        type=_detail,
        help="steps with module spans: auto, all, off, or every n-th",
    )
    parser.add_argument("--endpoint", metavar="URL", help="base URL of an OTLP receiver")


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Give the settings that were said on the command line."""
    options = ("record", "detail", "endpoint")
    return {name: getattr(arguments, name) for name in options if getattr(arguments, name) is not None}


def call(arguments: argparse.Namespace) -> int:
    """Run the program, recorded."""
    words = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not words:
        print("torchotel run: which script? See torchotel run --help", file=sys.stderr)
        return 2
    program = Program(words[0], tuple(words[1:]), arguments.module)
    if not program.module and not is_runnable(program.target):
        print(f"torchotel run: cannot read the script {program.target!r}", file=sys.stderr)
        return 2
    return run_recorded(program, given(arguments))


def _detail(text: str) -> str | int:
    return int(text) if text.isdecimal() else text
