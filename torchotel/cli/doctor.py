"""Check what telemetry depends on: versions, settings, the endpoint, ports, folders, and a model tried dry.

    torchotel doctor
    torchotel doctor --endpoint https://collector:4318
    torchotel doctor --model package.train:make_model --input 8x3x32x32

A test span is sent to the endpoint, and its trace id printed. --model names a module, or a class or function without
arguments that gives one, or (module, batch). Header values are never printed. Exit codes: 0 nothing
failed, 1 a check failed, 2 wrong use.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchotel._text import printable
from torchotel.cli.options import add_options, read_options

if TYPE_CHECKING:
    from torchotel.doctor.finding import Finding

_SIGNS = {"ok": "\N{CHECK MARK}", "warning": "!", "FAILED": "\N{BALLOT X}"}
_COLOURS = {"ok": "32", "warning": "33", "FAILED": "31"}
_SUBJECT_WIDTH = 11


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--model", metavar="MODULE:NAME", type=_place, help="a model, or what makes it, to be tried once"
    )
    parser.add_argument(
        "--input",
        metavar="SHAPE[:DTYPE]",
        type=_shape,
        action="append",
        default=[],
        help="its input, like 8x3x32x32 or 8x128:int64 (zeros); again for each further one",
    )
    add_options(parser)


def call(arguments: argparse.Namespace) -> int:
    """Print every finding as it comes, and how many failed."""
    if arguments.input and arguments.model is None:
        print("torchotel doctor: --input is that of a model: name it with --model MODULE:NAME", file=sys.stderr)
        return 2
    style = _Style()
    counts = {"ok": 0, "warning": 0, "FAILED": 0}
    for finding in _findings(arguments):
        counts[finding.level.value] += 1
        style.show(finding)
    print(f"\n{counts['ok']} ok, {counts['warning']} to look at, {counts['FAILED']} failed")
    return 1 if counts["FAILED"] else 0


def _findings(arguments: argparse.Namespace) -> Iterator[Finding]:
    from torchotel.doctor import examination  # noqa: PLC0415 - `torchotel --help` must not wait for it

    return examination.examine(read_options(arguments), os.environ, arguments.model, arguments.input)


def _place(text: str) -> str:
    module, _, name = text.partition(":")
    if not module or not name:
        raise argparse.ArgumentTypeError(f"{text!r} does not read MODULE:NAME, like package.train:make_model")
    return text


def _shape(text: str) -> tuple[tuple[int, ...], str]:
    sizes, _, dtype = text.partition(":")
    if not all(size.isdecimal() for size in sizes.split("x")):
        raise argparse.ArgumentTypeError(f"{text!r} does not read SHAPE[:DTYPE], like 8x3x32x32 or 8x128:int64")
    return tuple(map(int, sizes.split("x"))), dtype or "float32"


class _Style:
    """Signs and colours on a terminal, plain ASCII elsewhere."""

    def __init__(self) -> None:
        terminal = sys.stdout.isatty()
        self._signs = terminal and (sys.stdout.encoding or "").lower().startswith("utf")
        self._colours = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def show(self, finding: Finding) -> None:
        """Print a finding, its advice indented below it."""
        word = finding.level.value
        sign = _SIGNS[word] if self._signs else word
        width = 1 if self._signs else max(map(len, _SIGNS))
        shown = f"{sign:{width}}"
        if self._colours:
            shown = f"\x1b[{_COLOURS[word]}m{shown}\x1b[0m"
        indent = " " * (width + _SUBJECT_WIDTH + 2)
        self._print(f"{shown} {finding.subject:{_SUBJECT_WIDTH}} ", finding.text)
        for line in finding.advice.splitlines():
            self._print(indent, line)

    def _print(self, before: str, line: str) -> None:
        told = printable(line)
        # At once: the next check may take long.
        print(before + (told if self._signs else told.encode("ascii", "backslashreplace").decode()), flush=True)
