"""Test that the rank that the others wait for is named, with its phase and layer, or no rank if the data shows none."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support import PROGRAMS, commands, run_folders
from support.needs import needs_group_hooks
from support.ranks import run_ranks
from support.slow_rank_program import CASES

from torchotel.cli import main
from torchotel.runs import html, slow_rank
from torchotel.runs.compare import WARM_UP_STEPS
from torchotel.runs.rank_folders import open_ranks
from torchotel.runs.slow_rank import MIN_STEPS, RankComparison, compare_ranks

STEPS = MIN_STEPS + WARM_UP_STEPS
STEP_S = 0.1


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(str(PROGRAMS / "slow_rank_program.py"), str(folder), ranks=2, cwd=folder, **commands.SILENT)
    return folder


@needs_group_hooks
@pytest.mark.program
@pytest.mark.parametrize(
    ("case", "phase", "layer"),
    [
        ("data", "data loading", ""),
        ("between", "time between steps", ""),
        ("forward", "forward", "middle"),
        ("backward", "backward", "middle"),
    ],
)
def test_names_the_rank_the_phase_and_the_layer(
    recorded: Path, case: str, phase: str, layer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["summary", str(recorded / case)]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("rank 1 on host ")
    assert f": its {phase} costs every step " in first
    assert first.endswith(f"most of it in layer {layer}") == bool(layer)


@needs_group_hooks
@pytest.mark.program
def test_names_no_rank_if_the_ranks_are_slow_in_turns(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", str(recorded / "even")]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == "no rank is named as slow: no rank waits least in most of the steps"


@pytest.mark.program
def test_reads_one_rank_if_its_folder_is_named(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {f"{path.parent.name}/{path.name}" for path in recorded.glob("*/*")} == {
        f"{case}/rank{rank}" for case in CASES for rank in (0, 1)
    }
    assert main(["summary", str(recorded / "data" / "rank1")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("rank 1 of 2\nrun ")
    assert "waits" not in shown


Wait = Callable[[int, int], Mapping[str, float]]
"""Seconds of collectives by phase, of a rank and a step."""


def _compare(
    folder: Path,
    wait: Wait,
    own: Callable[[int, int], Mapping[str, float]] = lambda *_: {},
    *,
    ranks: int = 2,
    **more: Any,
) -> RankComparison:
    """Compare ranks whose steps have these waits, and these times of phases without waits."""
    for rank in range(ranks):
        lines = []
        for number in range(STEPS):
            waits = wait(rank, number)
            phases = {name: seconds + waits.get(name, 0.0) for name, seconds in own(rank, number).items()}
            line = run_folders.step(number, STEP_S, phases=phases, alignment=[number, 0], waits=waits)
            lines.append(line | more)
        resource = {"torch.run.id": "r", "torch.rank": rank, "torch.world_size": ranks, "host.name": f"node{rank}"}
        run_folders.write(folder / "run" / f"rank{rank}", info={"resource": resource, "finished": True}, units=lines)
    return compare_ranks(open_ranks(folder / "run"))


def _own(rank: int, _: int) -> Mapping[str, float]:
    return {"data": 0.05 if rank == 2 else 0.01, "forward": 0.02, "backward": 0.02}


def _at_1(rank: int, step: int) -> Mapping[str, float]:
    return _own(2 * rank, step)


def test_states_what_the_rank_costs(tmp_path: Path) -> None:
    """The cost is the longer wait of the others, at most the longer time of the rank itself."""
    found = _compare(tmp_path, lambda rank, _: {"backward": 0.01 if rank == 2 else 0.055}, _own, ranks=4)
    assert found.conclusion == "rank 2 on host node2: its data loading costs every step 40.00 ms (40%)"
    assert [rank.wait_s for rank in found.ranks] == [0.055, 0.055, 0.01, 0.055]


def test_compares_the_same_steps_of_a_long_run_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more steps than fit, a sample that does not depend on the rank."""
    most = WARM_UP_STEPS + 2
    monkeypatch.setattr(slow_rank, "MAX_STEPS", most)
    monkeypatch.setattr(slow_rank, "MIN_STEPS", 2)
    found = _compare(tmp_path, lambda rank, _: {"backward": 0.01 if rank == 1 else 0.05}, _at_1)
    assert (found.common_steps, [rank.steps for rank in found.ranks]) == (2, [STEPS, STEPS])
    assert found.slow is not None
    assert found.slow.rank == 1


def test_prefers_a_phase_without_collectives(tmp_path: Path) -> None:
    """A wait that overlaps with the backward of the fast ranks makes their backward seem short."""

    def own(rank: int, _: int) -> Mapping[str, float]:
        return {"between": 0.04 if rank else 0.0, "forward": 0.01, "backward": 0.05 if rank else 0.0}

    found = _compare(tmp_path, lambda rank, _: {"backward": 0.0 if rank else 0.04}, own)
    assert found.slow is not None
    assert (found.slow.rank, found.slow.phase) == (1, "between")
    assert found.slow.cost_s == pytest.approx(0.04)


def test_says_that_several_phases_are_slow(tmp_path: Path) -> None:
    """As on a host that is slow in all that it does."""

    def own(rank: int, _: int) -> Mapping[str, float]:
        longer = 2 if rank else 1
        return {name: longer * time_s for name, time_s in {"data": 0.01, "forward": 0.008, "optimizer": 0.009}.items()}

    found = _compare(tmp_path, lambda rank, _: {"backward": 0.0 if rank else 0.027}, own)
    assert found.conclusion == (
        "rank 1 on host node1: several phases, most of all its data loading, cost every step 27.00 ms (27%)"
    )


@pytest.mark.parametrize(
    ("wait", "more", "reason"),
    [
        (lambda *_: {}, {}, "no collectives were recorded, which needs torch 2.14 or later"),
        (lambda rank, _: {"backward": 0.001 * (1 - rank)}, {}, "the recorded collectives take less than 2% of a step"),
        (lambda rank, step: {"backward": 0.03 * ((rank + step) % 2)}, {}, "no rank waits least in most of the steps"),
        (
            lambda rank, step: {"backward": 0.05 + (0.03 * (step % 3 - 1) if rank else -0.002)},
            {},
            "the differences between the ranks are within the variation",
        ),
        (lambda rank, _: {"backward": 0.05 - 0.001 * rank}, {}, "the differences between the ranks are within"),
        (lambda rank, _: {"backward": 0.03 * (1 - rank)}, {"alignment": None}, "the ranks have no process group"),
    ],
)
def test_says_why_no_rank_is_named(tmp_path: Path, wait: Wait, more: Mapping[str, Any], reason: str) -> None:
    found = _compare(tmp_path, wait, _own, **more)
    assert found.slow is None
    assert reason in found.reason


def test_abstains_if_no_phase_of_the_rank_is_longer(tmp_path: Path) -> None:
    """The others then wait for something else than this rank."""
    found = _compare(tmp_path, lambda rank, _: {"backward": 0.03 * (1 - rank)}, _own)
    assert found.slow is None


def test_shows_how_each_rank_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _compare(tmp_path, lambda rank, _: {"backward": 0.03 * (1 - rank)}, _own, ranks=3)
    path = tmp_path / "run" / "rank1" / "run.json"
    path.write_text(path.read_text().replace('"finished": true', '"finished": true, "error": {"type": "ValueError"}'))
    assert main(["summary", str(tmp_path / "run"), "--top", "2"]) == 0
    shown = capsys.readouterr().out
    assert "1     node1  ended with ValueError  " in shown
    assert "ranks that wait longer: 1 " in shown


def test_the_report_advises_on_the_rank(tmp_path: Path) -> None:
    """The page draws the rank that waits least first, with its waits."""
    _compare(tmp_path, lambda rank, _: {"backward": 0.01 if rank == 1 else 0.05}, _at_1)
    content = html.gather(*open_ranks(tmp_path / "run"))
    first, *_ = html.advice.advise(content)
    assert first.title == "The other ranks wait for rank 1"
    section = html.rank_figure.section(content)
    assert section is not None
    assert section.lead.startswith("<b>Rank 1 on host node1: its data loading costs every step 40.00 ms (40%).</b> ")
    assert section.figure.data[-1].name == "waits"
    assert dict(zip(section.figure.data[-1].y, section.figure.data[-1].x, strict=True)) == {
        "rank 1 node1": 10,
        "rank 0 node0": 50,
    }
    assert html.rank_figure.section(html.gather(open_ranks(tmp_path / "run")[0])) is None


def test_report_diff_and_export_read_the_ranks_as_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`diff` compares rank 0; `export` has all ranks, and the spans of a trace in one file."""
    _compare(tmp_path, lambda rank, _: {"backward": 0.01 if rank == 1 else 0.05}, _at_1)
    for rank in range(2):
        request = run_folders.request([run_folders.span(f"torch.step rank {rank}", 1 + rank, 0, 10, 20)])
        (tmp_path / "run" / f"rank{rank}" / "trace-00001.jsonl").write_text(f"{request}\n")
    monkeypatch.chdir(tmp_path)
    assert main(["report", "run"]) == 0
    assert main(["diff", "run", "run/rank0"]) == 0
    assert main(["export", "run", "--format", "chrome"]) == 0
    assert main(["export", "run", "--format", "otlp", "-o", "run.json"]) == 0
    capsys.readouterr()
    assert "The other ranks wait for rank 1" in Path("run.html").read_text("utf-8")
    assert len(Path("run.json").read_text("utf-8").splitlines()) == 2
    events = json.loads(Path("run.chrome.json").read_text("utf-8"))["traceEvents"]
    assert {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "process_name"} == {
        (1, "torchotel rank 0"),
        (2, "torchotel rank 1"),
    }
    assert [(event["pid"], event["name"]) for event in events if event["ph"] == "X"] == [
        (1, "torch.step rank 0"),
        (2, "torch.step rank 1"),
    ]
