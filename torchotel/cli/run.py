"""Run a script, record each training step as a trace, and print a summary.

    torchotel run train.py --epochs 3
    torchotel run --detail all --no-shapes -m package.train --epochs 3

The program runs as under python, and its exit code is passed on. Options of torchotel come before the program. The
program is instrumented when it imports torch, in this process only; opentelemetry-instrument also instruments the
processes that a program starts. `-` is a script on standard input. A setting without an option is read from the
variable in brackets.
"""

import argparse
import sys

from torchotel.cli.options import add_options, read_options
from torchotel.cli.program import Program, is_runnable
from torchotel.cli.recording import run_recorded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = "%(prog)s [OPTIONS] {SCRIPT | -m MODULE | -} [ARGS ...]"
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("-q", "--quiet", action="store_true", help="print only problems at the end")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="script or module, and its own arguments")
    add_options(parser)


def call(arguments: argparse.Namespace) -> int:
    """Run the program, recorded."""
    words = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not words:
        print("torchotel run: no script given; see torchotel run --help", file=sys.stderr)
        return 2
    program = Program(words[0], tuple(words[1:]), arguments.module)
    if not program.module and not is_runnable(program.target):
        print(f"torchotel run: cannot read the script {program.target!r}", file=sys.stderr)
        return 2
    return run_recorded(program, read_options(arguments), quiet=arguments.quiet)
