"""Test `torchotel hang` on two real ranks, of which one is late, has failed, or calls another operation."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import PROGRAMS, commands, run_folders
from support.needs import needs_gloo_records
from support.prometheus_server import until
from support.ranks import next_line, start_ranks
from support.scraped_metrics import scrape, value

from torchotel.cli import main
from torchotel.runs import RunError, open_run
from torchotel.runs.hang import RankEvidence, read_evidence

PROGRAM = PROGRAMS / "waiting_ranks.py"
BEFORE = 7
"""Collectives before the wait: one for each of two parameters in three steps, and one more."""
GROUP = "0(default_pg)"


def line_of(code: str) -> str:
    """Return the place of a line of the program, as the command shows it."""
    return f"waiting_ranks.py:{next(n for n, line in enumerate(PROGRAM.read_text().splitlines(), 1) if code in line)}"


class Ranks:
    """Two ranks that wait.

    Args:
        folder: The folder of the runs.
        place: How they wait.
        worker: Where records are processed.
    """

    def __init__(self, folder: Path, place: str, worker: str) -> None:
        self.folder = folder
        self.programs = start_ranks(
            str(PROGRAM),
            str(folder),
            place,
            ranks=2,
            cwd=folder,
            **commands.SILENT,
            TORCHOTEL_WORKER=worker,
            TORCHOTEL_STALL_TIMEOUT_S="1",
            TORCHOTEL_RUN_ID="job-1",
        )
        """The programs of the ranks that have not been waited for."""
        self.ports = [int(next_line(program.stdout)) for program in self.programs]

    def until_read(self, *ranks: int) -> None:
        """Wait until ranks have read the flight recorder twice at the place."""
        until(self._ranks_at_the_place, lambda found: found >= set(ranks))

    def _ranks_at_the_place(self) -> set[int]:
        try:
            found = read_evidence([self.folder / "run"])
        except RunError:  # there is no folder yet
            return set()
        return {rank.rank for rank in found if not rank.reason and self._is_at_the_place(rank)}

    def _is_at_the_place(self, rank: RankEvidence) -> bool:
        group = rank.group(GROUP)
        return group is not None and group.enqueued >= BEFORE

    def collectives(self, rank: int, state: str) -> float | None:
        """Return the number of the last collective that a rank has enqueued or completed, as it is scraped."""
        name = f"torch_collective_{state}"
        return value(scrape(self.ports[rank]).series, name, torch_collective_group="default_pg")

    def go_on(self) -> None:
        """Let both ranks end normally."""
        (self.folder / "end").touch()
        while self.programs:
            code, _, errors = self.programs.pop().wait(60)
            assert code == 0, errors


@contextmanager
def ranks(folder: Path, place: str, worker: str = "process") -> Iterator[Ranks]:
    """Run two ranks until the end of the block."""
    running = Ranks(folder, place, worker)
    try:
        yield running
    finally:
        for program in running.programs:
            program.send_signal(signal.SIGKILL)
            program.wait(60)


@needs_gloo_records
@pytest.mark.program
@pytest.mark.parametrize("worker", ["process", "thread"])
def test_the_rank_that_is_late_is_named_with_its_stack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], worker: str
) -> None:
    """The collective, the line that the other rank waits in, and the numbers as metrics; later it is no hang."""
    with ranks(tmp_path, "one is late", worker) as running:
        running.until_read(0, 1)
        assert main(["hang", str(tmp_path / "run")]) == 1
        shown = capsys.readouterr().out
        assert f"Rank 1 is behind in group {GROUP}: all_reduce {BEFORE + 1} is not enqueued there." in shown
        waits = f"all_reduce {BEFORE + 1} at {line_of('    dist.all_reduce(gradient)')} in one_is_late"
        (row,) = [line.split() for line in shown.splitlines() if line.startswith("0 ")]
        assert f" {waits} " in " ".join(row)
        assert row[-2] == str(BEFORE + 1)
        stack = shown.partition("Rank 1 (host ")[2]
        assert f"\n  MainThread\n    {line_of('time.sleep(0.05)')} in wait_for_the_end\n" in stack
        assert f"\n    {line_of('        wait_for_the_end()')} in one_is_late\n" in stack
        assert main(["hang", str(tmp_path / "run" / "rank0"), str(tmp_path / "run" / "rank1")]) == 1
        assert [running.collectives(rank, "enqueued") for rank in (0, 1)] == [BEFORE + 1, BEFORE]
        assert [running.collectives(rank, "completed") for rank in (0, 1)] == [BEFORE, BEFORE]
        running.go_on()
    assert main(["hang", str(tmp_path / "run")]) == 0
    assert "rank 1 has no evidence: its run ended normally\n" in capsys.readouterr().out


@needs_gloo_records
@pytest.mark.program
def test_a_stall_is_not_in_the_trace_of_the_step(tmp_path: Path) -> None:
    """The step may go on, and all ranks share its trace."""
    with ranks(tmp_path, "one is late in a phase") as running:
        running.until_read(0, 1)
        running.go_on()
    runs = [open_run(tmp_path / "run" / f"rank{rank}") for rank in (0, 1)]
    traces = [{span.name: span.trace_id for span in run.spans() if not span.parent_id} for run in runs]
    assert [set(names) for names in traces] == [
        {"torch.run", "torch.step rank 0", "torch.stall"},
        {"torch.step rank 1", "torch.stall"},
    ]
    assert len({traces[0]["torch.stall"], traces[1]["torch.stall"], traces[0]["torch.step rank 0"]}) == 3
    assert traces[0]["torch.step rank 0"] == traces[1]["torch.step rank 1"]  # the last step


@needs_gloo_records
@pytest.mark.program
def test_different_operations_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ranks(tmp_path, "operations differ") as running:
        running.until_read(0, 1)
        assert main(["hang", str(tmp_path / "run" / "rank1")]) == 1
    shown = capsys.readouterr().out
    differ = f"collective {BEFORE + 1} of group {GROUP} differ: rank 0 all_reduce, rank 1 broadcast.\n"
    assert f"The operations of {differ}" in shown
    assert f"broadcast {BEFORE + 1} at {line_of('dist.broadcast')} in operations_differ" in shown
    assert "behind" not in shown


@needs_gloo_records
@pytest.mark.program
def test_a_slow_step_whose_collectives_go_on_is_no_hang(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ranks(tmp_path, "both are slow") as running:
        running.until_read(0, 1)
        assert main(["hang", str(tmp_path / "run")]) == 0
        shown = capsys.readouterr().out
        assert f"  the numbers of group {GROUP} have moved between the last two readings of ranks 0, 1\n" in shown
        running.go_on()


@needs_gloo_records
@pytest.mark.program
def test_a_rank_without_evidence_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No rank is called behind, but the collective that the other rank waits in is shown."""
    with ranks(tmp_path, "one is shut down") as running:
        running.until_read(0)
        assert main(["hang", str(tmp_path / "run")]) == 0
        shown = capsys.readouterr().out
        assert "  rank 1 has no evidence: its run ended normally\n" in shown
        assert f"  rank 0 waits in all_reduce {BEFORE + 1} at waiting_ranks.py:" in shown


def test_a_run_without_a_process_group_has_no_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hang", str(run_folders.net(tmp_path / "run"))]) == 0
    assert "  rank 0 has no evidence: its run ended normally\n" in capsys.readouterr().out


def test_folders_of_several_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(run_folders.write(tmp_path / name, info={"run_id": name})) for name in ("a", "b")]
    assert main(["hang", *folders]) == 2
    assert "the folders are of several runs (a, b)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("info", "units", "reason"),
    [
        (
            {"error": {"type": "ValueError", "message": "no more batches"}},
            (),
            "its run ended with ValueError: no more batches",
        ),
        ({}, [run_folders.step(3, 0.1, error={"type": "SIGKILL", "message": ""})], "its step 3 ended with SIGKILL"),
        (
            {},
            [
                run_folders.step(3, 0.1),
                run_folders.step(4, 60.1, kind="stall", error={"type": "stalled", "message": "here"}),
            ],
            "it stalls in step or evaluation 4, and Python did not answer: here",
        ),
        (
            {},
            [run_folders.step(3, 0.1)],
            "the flight recorder was not read since its step 3 ended, because the rank trains",
        ),
    ],
)
def test_the_reason_for_a_missing_reading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], info: Any, units: Any, reason: str
) -> None:
    """The end of the run, of the process or of the training, as far as the run folder shows it."""
    run = run_folders.write(
        tmp_path / "run", info={"run_id": "a", "resource": {"torch.world_size": 1000}, **info}, units=units
    )
    assert main(["hang", str(run)]) == 0
    shown = capsys.readouterr().out
    assert f"  rank 0 has no evidence: {reason}" in shown
    assert "  there is no run folder of ranks 1, 2, 3, 4, 5, 6, 7, 8 and 991 more\n" in shown
