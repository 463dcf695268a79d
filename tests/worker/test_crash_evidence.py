"""If the training process ends without a shutdown, the companion exports the open step and the cause."""

import fcntl
import json
import os
import re
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import cgroups, commands, crashing_program

from torchotel.runs import describe, open_run, run_failure, summarise

pytestmark = pytest.mark.program

STEPS = crashing_program.STEPS
ENDED = "The training process ended without a shutdown of torchotel"


class Crash:
    """A run of the program and of its companion, until both have ended.

    Args:
        folder: The run.
        place: Where it ends.
        end: How it ends.
        worker: process | thread.
        cgroup: The folder of the cgroup that both processes run in; None: that of this process.
        variables: Settings; without one no step is detailed.
    """

    def __init__(
        self,
        folder: Path,
        place: str,
        end: str,
        *,
        worker: str = "process",
        cgroup: Path | None = None,
        **variables: str,
    ) -> None:
        self.folder = folder
        words = [sys.executable, str(crashing_program.__file__), str(folder), place, end]
        if cgroup is not None:
            words = ["/bin/sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh", *words]
        # A file: a forked child that outlives the program would keep a pipe open.
        with (
            (folder.parent / "errors").open("w+") as errors,
            subprocess.Popen(
                words,
                env=commands.environment(
                    **{**commands.SILENT, "TORCHOTEL_WORKER": worker, "TORCHOTEL_DETAIL": "off", **variables}
                ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as process,
        ):
            assert process.stdout is not None
            assert process.stdin is not None
            pid, _ = process.stdout.readline().split()
            companion = os.pidfd_open(int(pid)) if pid != "None" else None
            process.stdin.write("\n")
            process.stdin.flush()
            self.code = process.wait(60)
            errors.seek(0)
            self.errors = errors.read()
            if companion is not None:  # a forked child of the program may still live
                assert select.select([companion], [], [], 60)[0]
                os.close(companion)
        self.lines = list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))
        self.info: dict[str, Any] = json.loads((folder / "run.json").read_text())

    @property
    def last(self) -> dict[str, Any]:
        line: dict[str, Any] = self.lines[-1]
        return line

    def steps(self) -> list[int]:
        return [line["number"] for line in self.lines if line["kind"] == "step"]

    def phases(self) -> list[tuple[str, bool]]:
        """Return the phases of the last trace, and whether their end is an estimate."""
        spans = [span for span in open_run(self.folder).spans() if span.trace_id == self.last["trace_id"]]
        phases = sorted((span for span in spans if span.parent_id), key=lambda span: (span.start_ns, span.name))
        names = [span.name.removeprefix("torch.").removesuffix(".step") for span in phases]
        return list(zip(names, ("torch.estimated" in span.attributes for span in phases), strict=True))

    def failure(self) -> str | None:
        """Return the end of the run as `torchotel summary` and the report name it."""
        run = open_run(self.folder)
        failure = run_failure(summarise(run.records(), run.spans()), run.info)
        return None if failure is None else describe(failure)


def error(kind: str, phase: str | None, message: str = ENDED) -> dict[str, Any]:
    return {"type": kind, "message": message, "path": None, "phase": phase}


@pytest.mark.parametrize(
    ("place", "phases", "where"),
    [
        ("forward", [("between", False), ("forward", True)], "in the forward"),
        ("backward", [("between", False), ("forward", False), ("backward", True)], "in the backward"),
        ("fetch", [("between", False), ("data", True)], "while fetching a batch"),
        (
            "forward after a fetch",
            [("between", False), ("data", False), ("forward", True)],
            "in the forward",
        ),
        (
            "optimizer",
            [("between", False), ("forward", False), ("backward", False), ("optimizer", True)],
            "in the optimizer's step",
        ),
    ],
)
def test_the_open_step_is_exported_up_to_the_kill(
    tmp_path: Path, place: str, phases: list[tuple[str, bool]], where: str
) -> None:
    crash = Crash(tmp_path / "run", place, "SIGKILL")
    assert crash.code == -signal.SIGKILL
    assert crash.steps() == [*range(STEPS), STEPS]
    assert crash.last["error"] == error("process_ended", phases[-1][0])
    assert not any(line["error"] for line in crash.lines[:-1])
    assert crash.phases() == phases
    assert crash.info["error"] == {"type": "process_ended", "message": ENDED, "path": None}
    assert not crash.info["finished"]
    assert crash.failure() == f"process_ended at step {STEPS}, {where}"


def test_a_kill_between_steps_keeps_the_last_step_without_an_error(tmp_path: Path) -> None:
    crash = Crash(tmp_path / "run", "between", "SIGKILL")
    assert crash.steps() == [*range(STEPS)]
    assert not any(line["error"] for line in crash.lines)
    assert crash.info["error"]["type"] == "process_ended"
    assert crash.failure() == f"process_ended after step {STEPS - 1}"


def test_a_kill_after_a_fetch_reports_no_step(tmp_path: Path) -> None:
    """The fetch may have found its iterator at the end, and no step has begun."""
    crash = Crash(tmp_path / "run", "between after a fetch", "SIGKILL")
    assert crash.steps() == [*range(STEPS)]
    assert crash.failure() == f"process_ended after step {STEPS - 1}"


def test_a_kill_in_an_evaluation_is_the_end_of_the_evaluation(tmp_path: Path) -> None:
    crash = Crash(tmp_path / "run", "evaluation", "SIGKILL")
    assert crash.steps() == [*range(STEPS)]
    assert [line["number"] for line in crash.lines if line["kind"] == "evaluation"] == [*range(STEPS + 1)]
    assert crash.last["kind"] == "evaluation"
    assert crash.last["error"] == error("process_ended", "forward")
    assert crash.failure() == f"process_ended at evaluation {STEPS}, after step {STEPS - 1}"


@pytest.mark.parametrize(("end", "code"), [("SIGTERM", -signal.SIGTERM), ("_exit", 3)])
def test_an_end_that_leaves_no_evidence_has_no_guessed_cause(tmp_path: Path, end: str, code: int) -> None:
    crash = Crash(tmp_path / "run", "forward", end)
    assert crash.code == code
    assert crash.last["error"] == error("process_ended", "forward")


@pytest.mark.parametrize(("place", "path"), [("layer", "_layer"), ("forward", "Program"), ("backward", None)])
def test_a_detailed_step_names_the_module_that_ran(tmp_path: Path, place: str, path: str | None) -> None:
    """Also if nothing but the memory of the status page is left, as after a kill for lack of memory."""
    crash = Crash(tmp_path / "run", place, "SIGKILL", TORCHOTEL_DETAIL="all")
    assert crash.last["error"]["path"] == crash.info["error"]["path"] == path
    where = "the backward" if path is None else f"the forward, in layer {path}"
    assert crash.failure() == f"process_ended at step {STEPS}, in {where}"


def test_a_fatal_signal_is_the_cause_with_the_innermost_line(tmp_path: Path) -> None:
    """The base name of the file alone: its path may be private."""
    crash = Crash(tmp_path / "run", "forward", "SIGSEGV")
    assert crash.code == -signal.SIGSEGV
    assert (crash.last["number"], crash.last["error"]["type"]) == (STEPS, "SIGSEGV")
    assert re.fullmatch(r'File "__init__.py", line \d+ in string_at', crash.last["error"]["message"])
    assert crash.info["error"]["type"] == "SIGSEGV"
    assert crash.failure() == f"SIGSEGV at step {STEPS}, in the forward"


def test_an_abort_names_the_line_of_the_program(tmp_path: Path) -> None:
    crash = Crash(tmp_path / "run", "backward", "abort")
    assert crash.code == -signal.SIGABRT
    assert crash.last["error"]["type"] == "SIGABRT"
    assert re.fullmatch(r'File "crashing_program.py", line \d+ in happen', crash.last["error"]["message"])
    assert crash.failure() == f"SIGABRT at step {STEPS}, in the backward"


def test_the_setting_of_texts_leaves_out_the_line(tmp_path: Path) -> None:
    crash = Crash(tmp_path / "run", "forward", "abort", TORCHOTEL_EXCEPTION_TEXT="type")
    assert crash.last["error"] == error("SIGABRT", "forward", "")


def test_the_program_keeps_its_own_faulthandler(tmp_path: Path) -> None:
    crash = Crash(tmp_path / "run", "forward", "SIGSEGV", PYTHONFAULTHANDLER="1")
    assert "Fatal Python error: Segmentation fault" in crash.errors
    assert crash.last["error"] == error("process_ended", "forward")


def test_a_forked_child_that_outlives_the_training_hides_nothing(tmp_path: Path) -> None:
    crash = Crash(tmp_path / "run", "forward", "fork")
    assert crash.last["error"] == error("process_ended", "forward")


def test_a_companion_that_dies_too_has_noted_the_open_step(tmp_path: Path) -> None:
    """As in a container that is killed for lack of memory. A file that a companion has locked is not read."""
    crash = Crash(tmp_path / "run", "forward", "SIGKILL of both")
    assert STEPS not in crash.steps()
    run, note = open_run(crash.folder), crash.folder / "unsent.jsonl"
    assert stat.S_IMODE(note.stat().st_mode) == 0o600
    with note.open() as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        assert STEPS not in [record.number for record in run.records()]
    assert [record.number for record in run.records()] == [*range(STEPS + 1)]
    assert crash.failure() == f"process_ended at step {STEPS}, in the forward"
    with (crash.folder / "metrics.jsonl").open("a") as lines:  # the records arrived after the note was written
        lines.writelines(note.read_text().splitlines(keepends=True))
    assert [record.number for record in run.records()] == [*range(STEPS + 1)]


@pytest.mark.parametrize("end", ["nothing", "SIGKILL"])
def test_a_companion_that_ends_leaves_no_note(tmp_path: Path, end: str) -> None:
    assert not (Crash(tmp_path / "run", "forward", end).folder / "unsent.jsonl").exists()


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A cgroup with little memory."""
    with cgroups.limited("memory", "memory.max", "memory.limit_in_bytes", 1 << 30) as folder:
        yield folder


def test_a_process_that_the_system_kills_for_lack_of_memory(tmp_path: Path, small_cgroup: Path) -> None:
    crash = Crash(tmp_path / "run", "backward", "lack of memory", cgroup=small_cgroup)
    assert crash.code == -signal.SIGKILL
    assert (crash.last["number"], crash.last["error"]["type"]) == (STEPS, "oom_kill")
    assert crash.failure() == f"oom_kill at step {STEPS}, in the backward"


def test_an_exception_for_lack_of_memory_is_recorded_as_any_other(tmp_path: Path) -> None:
    crash = Crash(tmp_path / "run", "backward", "lack of address space")
    assert crash.code == 1
    assert crash.last["error"]["type"] == "MemoryError"
    assert crash.failure() == f"MemoryError at step {STEPS}, in the backward"


def test_a_garbled_page_does_not_harm_the_companion(tmp_path: Path) -> None:
    """All that was received is exported, and the run has an end."""
    crash = Crash(tmp_path / "run", "between", "garbage")
    assert crash.steps()[: STEPS - 1] == [*range(STEPS - 1)]
    assert crash.info["error"]["type"] == "process_ended"
    assert crash.failure() is not None


def test_a_program_that_ends_normally_has_no_error(tmp_path: Path) -> None:
    crash = Crash(tmp_path / "run", "forward", "nothing")
    assert crash.steps() == [*range(STEPS + 1)]
    assert crash.info["finished"]
    assert crash.failure() is None


def test_the_thread_keeps_no_status_page(tmp_path: Path) -> None:
    """The run file ends with the last record that the worker wrote."""
    crash = Crash(tmp_path / "run", "forward", "SIGKILL", worker="thread")
    assert not any(line["error"] for line in crash.lines)
    assert crash.info["error"] is None


def test_summary_and_report_name_step_phase_and_cause(tmp_path: Path) -> None:
    crash = Crash(tmp_path / "run", "backward", "abort")
    shown = commands.torchotel("summary", str(crash.folder), cwd=tmp_path).stdout
    assert f"ended with  SIGABRT at step {STEPS}, in the backward\n" in shown
    assert 'File "crashing_program.py", line ' in shown
    assert f"the last whole step before it is {STEPS - 1}\n" in shown
    page = tmp_path / "report.html"
    done = commands.torchotel("report", str(crash.folder), "--output", str(page), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"The run ended with SIGABRT at step {STEPS}, in the backward" in page.read_text()
