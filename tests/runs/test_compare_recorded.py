"""What `torchotel diff` concludes from real runs on a machine that other programs used as well.

`recorded_times.json` has the times of five runs, in nanoseconds: a small convolutional network on one CPU thread, 300
steps (noisy) or 60 (quiet), in batches of 32 samples, or of 54 where it is slower. The steps of the noisy runs jump
between levels.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest

from torchotel._records import PHASES
from torchotel.runs.compare import Diff, Row, RunTimes, StepTimes, compare
from torchotel.runs.reader import LayerKey
from torchotel.runs.tables import render_diff

RUNS = json.loads((Path(__file__).parent / "recorded_times.json").read_text())
LIMIT = 0.05


def _seconds(times_ns: Sequence[int]) -> array[float]:
    return array("d", (time_ns / 1e9 for time_ns in times_ns))


def _times(name: str) -> RunTimes:
    run = RUNS[name]
    phases = {phase: _seconds(run["phases"].get(phase) or [0] * len(run["whole"])) for phase in PHASES}
    layers = {
        LayerKey("Sequential", path, direction): _seconds(times_ns)
        for key, times_ns in run["layers"].items()
        for direction, path in [key.split()]
    }
    return RunTimes(
        steps=StepTimes(_seconds(run["whole"]), phases, bytearray(map(int, run["detailed"]))), layers_s=layers
    )


def _compared(before: str, after: str) -> Diff:
    return compare([_times(before)], [_times(after)])


def _rows(diff: Diff) -> Sequence[Row]:
    return [*diff.steps, *diff.layers]


def test_finds_a_change_of_eighty_percent_in_noisy_runs() -> None:
    """A change of 80 % is found in noisy runs; an earlier interval was -81.2% … x17.3, of a layer up to x2.51e+06."""
    diff = _compared("noisy", "noisy slower")
    assert {"step", "forward", "backward"} <= {row.name for row in diff.regressions(LIMIT)}
    step = diff.steps[0].change
    assert step is not None
    assert step.value == pytest.approx(1.80, abs=0.01)
    assert step.low > 1.3
    assert step.high < 3


def test_narrows_the_change_of_a_quiet_run_down() -> None:
    """48 steps a side give an interval of less than 30 points to either side."""
    step = _compared("quiet", "quiet slower").steps[0]
    assert step.verdict(LIMIT) == "REGRESSION"
    assert step.change is not None
    assert step.change.value - 0.3 < step.change.low < 1.5 < step.change.high < step.change.value + 0.3


def test_takes_a_repetition_for_noise() -> None:
    diff = _compared("noisy", "noisy again")
    assert {row.verdict(LIMIT) for row in _rows(diff)} <= {"noise", "can't tell"}


@pytest.mark.parametrize("name", RUNS)
def test_finds_no_difference_between_a_run_and_itself(name: str) -> None:
    diff = _compared(name, name)
    assert {row.verdict(LIMIT) for row in _rows(diff)} == {"noise"}
    assert {row.change for row in _rows(diff)} == {(1, 1, 1)}
    assert render_diff(diff, LIMIT).splitlines()[-1] == "no regression beyond 5% that is more than noise"


@pytest.mark.parametrize("before", RUNS)
@pytest.mark.parametrize("after", RUNS)
def test_shows_no_absurd_factor(before: str, after: str) -> None:
    """An interval end that is ten times away is shown as unknown."""
    text = render_diff(_compared(before, after), LIMIT, top=100)
    assert all(float(word[1:]) < 20 for word in text.split() if word.startswith("x"))
