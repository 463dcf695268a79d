"""Test the comparison of two runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from support import run_folders as folders
from support import timed_runs

from torchotel.runs import RunError, open_run
from torchotel.runs.compare import CONFIDENCE, GATES, Diff, Gate, Row, RunTimes, compare, read_times, warm
from torchotel.runs.rank_folders import open_runs
from torchotel.runs.reader import LayerKey
from torchotel.runs.statistics import ratio
from torchotel.runs.tables import render_diff

LIMIT = 0.05


def _diff(
    tmp_path: Path, before: dict[str, Any] | None = None, after: dict[str, Any] | None = None, gate: Gate = "all"
) -> Diff:
    runs = [
        timed_runs.write(tmp_path / "a", seed=1, **(before or {})),
        timed_runs.write(tmp_path / "b", seed=2, **(after or {})),
    ]
    old, new = ([read_times(open_run(folder))] for folder in runs)
    return compare(old, new, gate)


def _verdicts(diff: Diff, limit: float = LIMIT) -> dict[str, str]:
    return {row.name: row.verdict(limit) for row in (*diff.steps, *diff.layers)}


def test_takes_two_runs_of_the_same_for_the_same(tmp_path: Path) -> None:
    diff = _diff(tmp_path)
    assert set(_verdicts(diff, 0.5).values()) == {"noise"}
    assert diff.regressions(0) == []


def test_finds_what_got_slower_and_by_how_much(tmp_path: Path) -> None:
    diff = _diff(tmp_path, after={"slower": {"forward": 1.5, "conv": 1.4}})
    found = {row.name: row for row in diff.regressions(LIMIT)}
    assert list(found) == ["step", "forward", "forward conv"]
    changes = {name: row.change.value for name, row in found.items() if row.change is not None}
    assert changes == {
        "step": pytest.approx(1.15, rel=0.03),
        "forward": pytest.approx(1.5, rel=0.03),
        "forward conv": pytest.approx(1.4, rel=0.03),
    }
    assert diff.regressions(0.6) == []
    assert _verdicts(diff, 0.6)["forward"] == "slower"


def test_says_what_got_faster(tmp_path: Path) -> None:
    diff = _diff(tmp_path, after={"slower": {"backward": 0.5}})
    assert _verdicts(diff)["backward"] == "faster"
    assert diff.regressions(0) == []


def test_tells_no_change_from_a_run_that_is_too_short_to_show_one(tmp_path: Path) -> None:
    """A change within noise is undecided only if its interval could hide a regression."""
    long, short = (_diff(tmp_path / str(steps), {"steps": steps}, {"steps": steps}) for steps in (2000, 20))
    assert set(_verdicts(long).values()) == {"noise"}
    assert _verdicts(short, 0.05)["forward conv"] == "can't tell"
    assert _verdicts(short, 0.05)["forward norm"] == "noise"  # a small part never fails
    assert short.regressions(0.05) == []
    change = short.steps[0].change
    assert change is not None
    assert [short.steps[0].verdict(change.high - 1 + more) for more in (-1e-9, 1e-9)] == ["can't tell", "noise"]


def test_says_how_many_cannot_be_told(tmp_path: Path) -> None:
    diff = _diff(tmp_path, {"steps": 20}, {"steps": 20})
    undecided = [row.name for row in (*diff.steps, *diff.layers) if row.verdict(LIMIT) == "can't tell"]
    said = f"no regression beyond 5% that is more than noise; {len(undecided)} of 8 can't be told without longer runs"
    assert render_diff(diff, LIMIT).splitlines()[-1] == said
    assert "can't be told" not in render_diff(diff, 9.0)


@pytest.mark.parametrize(
    ("gate", "failed"),
    [("step", ["step"]), ("phases", ["step", "forward"]), ("all", ["step", "forward", "forward conv"])],
)
def test_fails_on_what_is_asked_for_alone(tmp_path: Path, gate: Gate, failed: list[str]) -> None:
    """With --fail-on, the other parts are shown as slower."""
    diff = _diff(tmp_path, after={"slower": {"forward": 1.5, "conv": 1.4}}, gate=gate)
    assert [row.name for row in diff.regressions(LIMIT)] == failed
    shown = _verdicts(diff)
    assert [shown[name] for name in ("step", "forward", "forward conv") if name not in failed] == ["slower"] * (
        3 - len(failed)
    )


def test_widens_intervals_for_what_can_fail(tmp_path: Path) -> None:
    """Intervals are narrower with fewer parts that can fail; other parts are corrected for all shown parts."""

    def width(row: Row) -> float:
        assert row.change is not None
        return row.change.high / row.change.low

    step, phases, every = (_diff(tmp_path / gate, gate=gate) for gate in GATES)
    assert width(step.steps[0]) < width(phases.steps[0]) < width(every.steps[0])
    assert [width(row) for row in step.layers] == [width(row) for row in every.layers]
    before, after = (read_times(open_run(tmp_path / "step" / name)).steps.of_kind(detailed=False) for name in "ab")
    assert step.steps[0].change == ratio(warm(before.whole_s), warm(after.whole_s), confidence=CONFIDENCE)


def test_fails_for_no_trifle(tmp_path: Path) -> None:
    diff = _diff(tmp_path, after={"slower": {"norm": 3.0}})
    assert _verdicts(diff)["forward norm"] == "slower, but small"
    assert diff.regressions(LIMIT) == []


def test_sets_like_against_like(tmp_path: Path) -> None:
    """Steps with detail take longer, and B has more of them, yet nothing is slower."""
    diff = _diff(tmp_path, before={"detail": 4}, after={"detail": 2})
    assert (diff.compared, diff.steps[0].before.steps, diff.steps[0].after.steps) == ("plain", 36, 24)
    assert diff.regressions(LIMIT) == []
    every = _diff(tmp_path / "every", before={"detail": 1}, after={"detail": 1})
    assert (every.compared, set(_verdicts(every, 0.5).values())) == ("detailed", {"noise"})
    mixed = _diff(tmp_path / "mixed", before={"detail": 1}, after={"detail": 0})
    assert (mixed.compared, mixed.layers) == ("all", [])


def test_leaves_out_the_warm_up_and_what_failed(tmp_path: Path) -> None:
    folder = timed_runs.write(tmp_path / "run", steps=20, detail=2, first_s=100.0)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[10] |= {"error": {"type": "ValueError", "message": "no"}, "duration_s": 1e-6}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    times = read_times(open_run(folder))
    assert (len(times.steps.whole_s), len(times.layers_s[LayerKey("Net", "conv", "forward")])) == (19, 9)
    diff = compare([times], [times])
    assert diff.steps[0].before.steps == 8
    assert diff.steps[0].before.median_s == pytest.approx(0.1, rel=0.1)


def test_counts_a_layers_own_time_alone_and_no_evaluations(tmp_path: Path) -> None:
    spans = [
        folders.module("Net", 2, 0, 0, 40),
        folders.module("conv", 3, 2, 0, 30),
        folders.module("conv", 4, 2, 30, 35),
        folders.module("conv", 5, 0, 50, 90, direction="backward"),
    ]
    evaluated = {**folders.module("conv", 6, 0, 0, 1000, step=None), "traceId": "f" * 32}
    lines = [folders.request(spans), folders.request([evaluated])]
    layers = read_times(open_run(folders.write(tmp_path / "run", segments=[lines]))).layers_s
    assert {key[1:]: list(times) for key, times in layers.items()} == {
        ("Net", "forward"): [pytest.approx(5e-9)],
        ("conv", "forward"): [pytest.approx(35e-9)],
        ("conv", "backward"): [pytest.approx(40e-9)],
    }


def test_names_layers_that_only_one_run_has(tmp_path: Path) -> None:
    diff = _diff(tmp_path, before={"layers": {"conv": 0.2, "old": 0.1}}, after={"layers": {"conv": 0.2, "new": 0.1}})
    assert (diff.only_before, diff.only_after) == (["forward old"], ["forward new"])
    text = render_diff(diff, LIMIT)
    assert "only in A: forward old\nonly in B: forward new" in text


@pytest.mark.parametrize(
    ("after", "why"),
    [
        ({"layers": {"new": 0.2}}, "no layer has the same name in both runs"),
        ({"detail": 0}, "no step was recorded in detail in both runs"),
    ],
)
def test_says_why_no_layers_are_compared(tmp_path: Path, after: dict[str, Any], why: str) -> None:
    text = render_diff(_diff(tmp_path, before={"layers": {"old": 0.2}}, after=after), LIMIT)
    assert f"no layers to compare: {why}" in text


def test_refuses_runs_that_are_too_short_to_judge(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"48 and 3 steps are left to compare .* it takes 5"):
        _diff(tmp_path, before={"detail": 0, "steps": 58}, after={"detail": 0, "steps": 4})


def _side(folder: Path, seed: int, speeds: list[float]) -> list[RunTimes]:
    """Write runs of which each is slower as a whole, by a factor."""
    names = (*timed_runs.PHASES, *timed_runs.LAYERS)
    for place, speed in enumerate(speeds):
        timed_runs.write(folder / str(place), seed=seed + place, slower=dict.fromkeys(names, speed))
    return [read_times(run) for run in open_runs(folder)]


def test_takes_what_differs_from_run_to_run_for_noise(tmp_path: Path) -> None:
    """A single run of B is slower than one of A, as is another run of A, so the change is noise."""
    before = _side(tmp_path / "a", 1, [1.0, 1.15, 1.05])
    after = _side(tmp_path / "b", 11, [1.15, 1.04, 1.1])
    assert [row.name for row in compare(before[:1], after[:1], "step").regressions(LIMIT)] == ["step"]
    diff = compare(before, after, "step")
    assert (diff.runs, diff.steps[0].verdict(LIMIT)) == ((3, 3), "can't tell")
    assert render_diff(diff, LIMIT).endswith("; 1 of 1 can't be told without more runs")
    assert "compared: 3 and 3 runs of at least 24 and 24 steps without detail" in render_diff(diff, LIMIT)


@pytest.mark.parametrize("runs", [1, 3])
def test_finds_what_is_slower_than_other_runs_of_the_same(tmp_path: Path, runs: int) -> None:
    """A regression is found beyond the variation of runs, even if B is a single run."""
    before = _side(tmp_path / "a", 1, [1.0, 1.02, 1.01, 0.99, 1.0])
    diff = compare(before, _side(tmp_path / "b", 11, [1.31, 1.29, 1.3][:runs]), "step")
    assert [row.name for row in diff.regressions(LIMIT)] == ["step"]
    step = diff.steps[0]
    assert step.change is not None
    assert step.change.value == pytest.approx(1.3, rel=0.02)
    assert step.after.median_s / step.before.median_s == pytest.approx(step.change.value)


def test_judges_no_layer_of_too_few_steps(tmp_path: Path) -> None:
    diff = _diff(tmp_path, after={"detail": 20, "slower": {"conv": 9.0}})
    assert _verdicts(diff)["forward conv"] == "too few steps"
    assert diff.regressions(LIMIT) == []


def test_lays_out_what_fails_however_few_layers_are_asked_for(tmp_path: Path) -> None:
    diff = _diff(tmp_path, after={"slower": {"fc": 12.0, "conv": 1.3}})
    text = render_diff(diff, LIMIT, top=0)
    assert "compared: 24 and 24 steps without detail; warm-up and failed steps left out" in text
    assert "1 further layers, which changed less" in text
    assert text.splitlines()[-1].startswith("2 regressions beyond 5%: forward fc x1")


def test_does_not_obey_a_strangers_names(tmp_path: Path) -> None:
    layers = {"layers": {"\x1b[2J\rconv": 0.2}}
    diff = _diff(tmp_path, layers, layers)
    text = render_diff(diff, LIMIT)
    assert "forward ?[2J?conv" in text
    assert "\x1b" not in text
