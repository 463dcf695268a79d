"""Test that a server is started once, with concurrent commands."""

import fcntl
import os
import subprocess
import threading
from pathlib import Path
from typing import IO, Any

import pytest
from support.prometheus_server import until

from torchotel.stack.native import Process


def test_a_start_is_not_lost_beside_one_who_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that reads the pid locks the file briefly; a concurrent start still succeeds."""
    process, tried, flock = Process(tmp_path), threading.Event(), fcntl.flock

    def noticed(file: IO[bytes], kind: int) -> None:
        try:
            flock(file, kind)
        finally:
            tried.set()

    with (tmp_path / "pid").open("a+b") as asking:
        flock(asking, fcntl.LOCK_SH)
        monkeypatch.setattr(fcntl, "flock", noticed)
        starting = threading.Thread(target=process.start, args=(["sleep", "600"], {}))
        starting.start()
        tried.wait()
    starting.join()
    try:
        assert process.pid
    finally:
        process.stop()


@pytest.mark.program
def test_the_pid_of_before_is_gone_while_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The previous pid is removed before a start, since another process may have it."""
    process, popen = Process(tmp_path), subprocess.Popen
    seen: list[int | None] = []

    def looked(*words: Any, **options: Any) -> "subprocess.Popen[bytes]":
        seen.append(process.pid)
        return popen(*words, **options)

    (tmp_path / "pid").write_text("1")
    monkeypatch.setattr(subprocess, "Popen", looked)
    process.start(["sleep", "600"], {})
    try:
        assert seen == [None]
        assert process.pid
    finally:
        process.stop()


def test_a_second_start_leaves_the_first(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.start(["sleep", "600"], {})
    try:
        first = process.pid
        process.start(["sleep", "600"], {})
        assert process.pid == first is not None
    finally:
        process.stop()


def test_the_log_of_the_one_before_is_kept(tmp_path: Path) -> None:
    """The log of the previous process is kept, since it may contain the reason of its failure."""
    process = Process(tmp_path)
    for said in ("first", "second"):
        process.start(["echo", said], {"PATH": os.environ["PATH"]})
        until(lambda: process.pid, lambda pid: pid is None)
    assert (tmp_path / "log.1").read_text() == "first\n"
    assert process.log.read_text() == "second\n"
