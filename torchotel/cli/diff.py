"""Compare recorded runs: what takes longer in B than in A, by how much, and whether it is noise.

    torchotel diff runs/main runs/branch --max-regression 5% --fail-on step

The exit code is 1 where the step, a phase or a layer got slower by more than --max-regression and that is more than
noise, else 0; 2 where a run cannot be read or is too short. So it is a gate for CI. With --fail-on step the step alone
can fail, and as it is judged alone, it takes less to find that it is slower.

Medians stand beside half of the distance between their quartiles (±). The interval is that of the ratio of the
medians, widened for steps that are like those before them and for how many things can fail: where it holds no change at
all, the change is noise, and where it reaches beyond --max-regression as well, a regression could hide in it, so it
can't be told. An end that is ten times away from the change is unknown (?).

It would rather miss a change than cry wolf, so what can't be told does not fail. Of simulated pairs of runs of equal
code less than 1 in 20 shows anything slower or faster, if steps are like the one before by a correlation of up to 0.5
in 20 steps, and up to 0.8 from 60 on. What it finds needs steps: with nine layers and 5 % of noise, a step that is
20 % slower in 98 % of pairs of 20 steps that are not alike; where they are alike by 0.8, it takes 200 of them. To tell
that there is no regression of 5 % takes 100 with --fail-on step, 400 without.

Warm-up is left out: the first fifth of the steps, ten at most. So are failed steps, and what takes less than 1 % of
the step is shown but never fails. Steps with detail are not compared with steps without, and a layer's time is its
own, without the layers inside it. What else differs, such as the machine, torch or a setting, is said first.

Within two runs it cannot be seen what makes a whole run slower, such as another program on the machine, and that
fails the gate. For that A and B may each be a folder that holds several runs of the same code, of which rank 0 counts:
then the runs are compared instead of their steps, by Student's t on the logarithms of their medians. Record both
sides in turns, so that a machine that gets slower does so for both.
"""

import argparse
from pathlib import Path

from torchotel._text import printable
from torchotel.cli.terminal import Terminal
from torchotel.report.diff import GATES, compare
from torchotel.report.difftable import render_diff
from torchotel.report.runs import open_runs
from torchotel.report.times import read_times

MAX_REGRESSION = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("before", type=Path, metavar="A", help="run folder to compare with, or a folder of several")
    parser.add_argument("after", type=Path, metavar="B", help="run folder to judge, or a folder of several")
    parser.add_argument(
        "--max-regression",
        type=share,
        default=MAX_REGRESSION,
        metavar="5%",
        help="slower than this is a regression, such as 5%% or 0.05 (default: 5%%)",
    )
    parser.add_argument(
        "--fail-on",
        choices=GATES,
        default="all",
        help="what can fail: the step alone, its phases as well, or all, with the layers (default: all)",
    )
    parser.add_argument("--top", type=int, default=10, metavar="N", help="layers to show (default: 10)")


def call(arguments: argparse.Namespace) -> int:
    """Print the comparison."""
    before, after = (list(map(read_times, open_runs(side))) for side in (arguments.before, arguments.after))
    diff = compare(before, after, arguments.fail_on)
    print(printable(f"A  {arguments.before}"), printable(f"B  {arguments.after}"), "", sep="\n")
    print(render_diff(diff, arguments.max_regression, top=arguments.top, output=Terminal()))
    return 1 if diff.regressions(arguments.max_regression) else 0


def share(text: str) -> float:
    """Read a share, written as 5% or 0.05.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    number, percent, rest = text.strip().partition("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if rest or not 0 <= value < float("inf") or (value >= 1 and not percent):
        raise argparse.ArgumentTypeError(f"{text!r} is no share: write 5% or 0.05")
    return value
