"""Check versions, settings, the endpoint, ports and folders, and try a model without a training.

    torchotel doctor
    torchotel doctor --endpoint https://collector:4318
    torchotel doctor --model package.train:make_model --input 8x3x32x32

A test span is sent to the endpoint, and its trace id is printed. --model names a module, or a class or function
without arguments that returns a module or (module, batch). Header values are never printed.
Exit codes: 0 no check failed, 1 a check failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchotel._utils.text import GREEN, RED, YELLOW, printable
from torchotel.cli.options import add_options, read_options
from torchotel.cli.terminal import Terminal
from torchotel.doctor import runner

if TYPE_CHECKING:
    from torchotel.doctor.result import Finding

_SIGNS = {"ok": "\N{CHECK MARK}", "warning": "!", "FAILED": "\N{BALLOT X}"}
_COLOURS = {"ok": GREEN, "warning": YELLOW, "FAILED": RED}
_SUBJECT_WIDTH = 11


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--model", metavar="MODULE:NAME", type=_place, help="model, or function that returns one, to run for one step"
    )
    parser.add_argument(
        "--input",
        metavar="SHAPE[:DTYPE]",
        type=_shape,
        action="append",
        default=[],
        help="shape of its input, like 8x3x32x32 or 8x128:int64 (zeros); repeat it for further inputs",
    )
    add_options(parser)


def call(arguments: argparse.Namespace) -> int:
    """Print each finding when its check ends, then the counts; return 1 if a check failed."""
    if arguments.input and arguments.model is None:
        print("torchotel doctor: --input needs a model: name it with --model MODULE:NAME", file=sys.stderr)
        return 2
    terminal = Terminal()
    counts = {"ok": 0, "warning": 0, "FAILED": 0}
    for finding in _findings(arguments):
        counts[finding.level.value] += 1
        show_finding(finding, terminal)
    print(f"\n{counts['ok']} ok, {counts['warning']} to look at, {counts['FAILED']} failed")
    return 1 if counts["FAILED"] else 0


def _findings(arguments: argparse.Namespace) -> Iterator[Finding]:
    return runner.run_checks(read_options(arguments), os.environ, arguments.model, arguments.input)


def _place(text: str) -> str:
    module, _, name = text.partition(":")
    if not module or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not MODULE:NAME, like package.train:make_model")
    return text


def _shape(text: str) -> tuple[tuple[int, ...], str]:
    sizes, _, dtype = text.partition(":")
    if not all(size.isdecimal() for size in sizes.split("x")):
        raise argparse.ArgumentTypeError(f"{text!r} is not SHAPE[:DTYPE], like 8x3x32x32 or 8x128:int64")
    return tuple(map(int, sizes.split("x"))), dtype or "float32"


def show_finding(finding: Finding, terminal: Terminal) -> None:
    """Print a finding, with its advice indented below it."""
    word = finding.level.value
    sign = _SIGNS[word] if terminal.has_unicode else word
    width = 1 if terminal.has_unicode else max(map(len, _SIGNS))
    indent = " " * (width + _SUBJECT_WIDTH + 2)
    start = f"{sign:{width}} {finding.subject:{_SUBJECT_WIDTH}} "
    lines = [f"{start}{printable(finding.text)}", *(indent + printable(line) for line in finding.advice.splitlines())]
    wrapped = "\n".join(piece for line in lines for piece in terminal.wrap(line, indent))
    if not terminal.has_unicode:
        wrapped = wrapped.encode("ascii", "backslashreplace").decode()
    # Flushed, since the next check may take seconds.
    print(terminal.colour(wrapped[:width], _COLOURS[word]) + wrapped[width:], flush=True)
