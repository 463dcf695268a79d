"""Commands in a process of their own, as users start them."""

import os
import pty
import subprocess
import sys
from pathlib import Path

from support.forked_python import ForkedProgram

SILENT = {"OTEL_TRACES_EXPORTER": "none"}
ANY_PORT = {"OTEL_EXPORTER_PROMETHEUS_PORT": "0"}  # tests of several checkouts may run on one machine
TIMEOUT_S = 900  # a limit for what hangs, not for what a busy machine does slowly


def environment(**more: str) -> dict[str, str]:
    """Take this process's environment without settings of telemetry and the width of its terminal."""
    others = ("OTEL_", "TORCHOTEL_", "COLUMNS")  # the last one wraps what commands print
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    return {**kept, **ANY_PORT, **more}


def torchotel(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "torchotel", *words, cwd=cwd, **{**SILENT, **variables})


def python(*words: str, cwd: Path, stdin: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        input=stdin,
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def forked_python(
    *words: str, cwd: Path, stdin: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program as `python` does, in a fork that has torch; `forked_python.py` says what for."""
    program = ForkedProgram(words, cwd, environment(**variables), stdin)
    return subprocess.CompletedProcess(words, *program.wait(TIMEOUT_S))


def on_a_terminal(*words: str, cwd: Path, **variables: str) -> tuple[int, str]:
    """Run `torchotel` on a terminal of its own; return its exit code and what it wrote there."""
    ours, theirs = pty.openpty()
    colours = {"PYTHONUTF8": "1", "NO_COLOR": "", "FORCE_COLOR": "", "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-m", "torchotel", *words],
        cwd=cwd,
        env=environment(**{**SILENT, **colours, **variables}),
        stdout=theirs,
    ) as process:
        os.close(theirs)
        read = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # Linux reports the closed other end as an error
                break
            if not piece:
                break
            read += piece
    os.close(ours)
    return process.returncode, read.decode().replace("\r\n", "\n")
