"""Compare recorded runs: show how much slower each part is in B than in A, and whether that is noise.

    torchotel diff runs/main runs/branch --max-regression 5% --fail-on step

The exit code is 1 if the step, a phase or a layer is slower by more than --max-regression and the change is more than
noise, else 0. It is 2 if a run cannot be read or is too short. So the command is a gate for CI. With --fail-on step,
only the step can fail, and fewer steps are needed to find that it is slower.

Each median is printed with half of its interquartile range (±). The interval is that of the ratio of the medians. It
is widened if steps are like the steps before them, and for the number of things that can fail. If the interval
contains no change, the change is noise. If it also reaches beyond --max-regression, it could hide a regression, so
the result is undecided. An end of the interval that is ten times away from the change is unknown (?).

An undecided result does not fail, so some regressions are missed and false alarms are rare. Among simulated pairs of
runs of equal code, fewer than 1 in 20 show any part slower or faster, if consecutive steps correlate by up to 0.5
(20 steps) or up to 0.8 (60 steps or more). Regressions are found if there are enough steps: with nine layers and 5 %
of noise, a step that is 20 % slower is found in 98 % of pairs of 20 uncorrelated steps; with a correlation of 0.8,
200 steps are needed. To exclude a regression of 5 % takes 100 steps with --fail-on step, 400 without.

Warm-up is left out: the first fifth of the steps, ten at most. Failed steps are left out too. Parts that take less
than 1 % of the step are shown but never fail. Steps with detail are not compared with steps without. A layer's time
excludes the layers inside it. Other differences, such as the machine, torch or a setting, are printed first.

A cause that slows a whole run, such as another program on the machine, cannot be told from a regression in two runs,
and fails the gate. For that case, A and B may each be a folder of several runs of the same code, of which rank 0
counts. Then runs are compared instead of steps, by Student's t on the logarithms of their medians. Record A and B in
turns, so that a machine that slows down affects both.

Of a run with several ranks, rank 0 counts too: the ranks of a synchronous training have equal steps. To compare two
ranks, name their folders, such as A/rank0 and A/rank1.
"""

import argparse
from pathlib import Path

from torchotel._utils.text import printable
from torchotel.cli.terminal import Terminal, layers_to_show
from torchotel.runs.compare import GATES, compare, read_times
from torchotel.runs.rank_folders import open_runs
from torchotel.runs.tables import render_diff

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
        help="largest slowdown that is accepted, such as 5%% or 0.05 (default: 5%%)",
    )
    parser.add_argument(
        "--fail-on",
        choices=GATES,
        default="all",
        help="times that can fail: the step, the step and its phases, or all including layers (default: all)",
    )
    parser.add_argument("--top", type=layers_to_show, default=10, metavar="N", help="layers to show (default: 10)")


def call(arguments: argparse.Namespace) -> int:
    """Print the comparison; return 1 if there is a regression."""
    before, after = (list(map(read_times, open_runs(side))) for side in (arguments.before, arguments.after))
    diff = compare(before, after, arguments.fail_on)
    print(printable(f"A  {arguments.before}"), printable(f"B  {arguments.after}"), "", sep="\n")
    print(render_diff(diff, arguments.max_regression, top=arguments.top, output=Terminal()))
    return 1 if diff.regressions(arguments.max_regression) else 0


def share(text: str) -> float:
    """Read a share, written as 5% or 0.05.

    Raises:
        argparse.ArgumentTypeError: The text is not a share.
    """
    number, percent, rest = text.strip().partition("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if rest or not 0 <= value < float("inf") or (value >= 1 and not percent):
        raise argparse.ArgumentTypeError(f"{text!r} is not a share: write 5% or 0.05")
    return value
