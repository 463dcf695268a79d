"""The companion of a process that may be a launcher starts with the first record."""

import json
import os
from pathlib import Path

import pytest
from support import spawned_program
from support.commands import python
from support.otlp_http_receiver import receiver

from torchotel.runs import open_run

pytestmark = pytest.mark.program

NOTHING_YET = "[False, False, False] True None"


def run(what: str, folder: Path) -> tuple[list[str], str, int]:
    """Return what the child prints, its standard error, and how many steps arrive."""
    with receiver() as server:
        url = server.url.removesuffix("/v1/traces")
        program = Path(spawned_program.__file__)
        paths = os.pathsep.join(map(str, program.parents[1:3]))
        done = python(str(program), str(folder), url, what, cwd=folder.parent, PYTHONPATH=paths)
        return done.stdout.splitlines(), done.stderr, sum(span.name == "torch.step" for span in server.spans)


@pytest.mark.parametrize("what", ["train", "another thread", "zero code"])
def test_it_starts_with_the_first_record(what: str, tmp_path: Path) -> None:
    """What was logged before is in the run file; nothing of replaced settings remains."""
    lines, errors, steps = run(what, tmp_path / "run")
    assert lines == [NOTHING_YET, "[True, True, True] True", "2 True False"], errors
    assert steps == 2
    (record,) = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open() if "learning_rate" in line)
    assert (record["kind"], record["values"]) == ("log", {"learning_rate": 0.1})
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_without_a_record_there_is_none(tmp_path: Path) -> None:
    assert run("idle", tmp_path / "run") == ([NOTHING_YET, "[False, False, False] True", "0 True False"], "", 0)
    assert not list(tmp_path.iterdir())


def test_a_fork_before_the_first_record(tmp_path: Path) -> None:
    lines, errors, steps = run("fork", tmp_path / "run")
    assert lines == [NOTHING_YET, "[]", "[True, True, True] True", "2 True False"], errors
    assert steps == 2


def test_steps_of_a_signal_handler_amid_the_start_are_recorded(tmp_path: Path) -> None:
    """The backward that the start interrupts belongs to the handler's first step."""
    lines, errors, steps = run("handler", tmp_path / "run")
    assert lines == [NOTHING_YET, "flushed amid the start: False", "[True, True, True] True", "3 True False"], errors
    assert steps == 3


def test_ctrl_c_in_the_start_costs_no_record(tmp_path: Path) -> None:
    """The next record starts another companion; of the interrupted step it is unknown whether it is whole."""
    lines, errors, steps = run("interrupt", tmp_path / "run")
    assert lines == [NOTHING_YET, "[True, True, True] True", f"{steps} True False"], errors
    assert steps >= 2
    assert errors == ""


def test_a_stream_that_was_closed_before_the_first_record_takes_the_thread(tmp_path: Path) -> None:
    lines, errors, steps = run("closed streams", tmp_path / "run")
    assert lines == [NOTHING_YET, "[False, True, True] True", "2 True False"], errors
    assert steps == 2


def test_the_open_step_of_a_killed_child_is_exported(tmp_path: Path) -> None:
    """The companion gets the phases from before its start, too."""
    _, errors, _ = run("kill", tmp_path / "run")
    records = [record for record in open_run(tmp_path / "run").records() if record.kind == "step"]
    assert [(record.number, record.error_type, record.error_phase) for record in records] == [
        (0, None, ""),
        (1, None, ""),
        (2, "process_ended", "forward"),
    ], errors


def test_a_child_that_is_killed_in_its_first_step_leaves_evidence(tmp_path: Path) -> None:
    _, errors, _ = run("kill the first step", tmp_path / "run")
    records = [
        (record.number, record.error_type, record.error_phase) for record in open_run(tmp_path / "run").records()
    ]
    assert records == [(0, "process_ended", "backward")], errors


def test_a_folder_that_cannot_be_used_costs_only_the_run_file(tmp_path: Path) -> None:
    lines, errors, steps = run("no folder", tmp_path / "run")
    assert lines == [NOTHING_YET, "[False, True, False] True", "2 True False"], errors
    assert "this process is not recorded" in errors
    assert steps == 2


def test_a_companion_that_cannot_be_started_costs_nothing(tmp_path: Path) -> None:
    lines, errors, steps = run("no process", tmp_path / "run")
    assert lines == [NOTHING_YET, "[False, True, True] True", "2 True False"], errors
    assert "it cannot be started (Resource temporarily unavailable)" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert steps == 2
