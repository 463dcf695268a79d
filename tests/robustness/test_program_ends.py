"""However a program ends, it ends as it would have, and its run file reads up to its last whole line."""

from __future__ import annotations

import json
import signal
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
from support import fault_program
from support.commands import environment
from support.forked_python import ForkedProgram
from support.misbehaving_servers import misbehaving, silence

from torchotel.runs.reader import open_run

pytestmark = pytest.mark.program

PROGRAM = fault_program.__file__
KILLED = "is killed"


class End(NamedTuple):
    """A row of the table."""

    what: str
    signals: tuple[signal.Signals, ...] = ()
    """Sent one after the other, each when a line has come."""
    finished: bool = False
    """Whether the run file knows what became of the run."""

    def __str__(self) -> str:
        return "-".join([self.what, *(one.name for one in self.signals)])


ENDS = (
    End(KILLED, (signal.SIGTERM,)),
    End(KILLED, (signal.SIGKILL,)),
    End("ends in order at SIGTERM", (signal.SIGTERM,), finished=True),
    End("is interrupted", (signal.SIGINT,), finished=True),
    End("is interrupted", (signal.SIGINT, signal.SIGINT), finished=True),
    End("os._exit"),
    End("fork", finished=True),
    End("a daemon thread trains on", finished=True),
    End("trains in an earlier atexit", finished=True),
    End("trains in a later atexit", finished=True),
    End("a full disk"),
)


def run(end: End, endpoint: str, folder: Path, **variables: str) -> tuple[int, str, str]:
    """Run the program to its end; give its exit code and what it said."""
    program = ForkedProgram((PROGRAM, end.what, endpoint, str(folder)), folder.parent, environment(**variables))
    said = ""
    for one in end.signals:
        said += program.stdout.readline()
        program.send_signal(one)
    code, out, errors = program.wait(120)
    return code, said + out, errors


@cache
def run_plain(end: End) -> tuple[int, str]:
    """Run the program without torchotel, once for both workers; give its exit code and what it said."""
    with TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        code, said, _ = run(end, "http://localhost:1", folder, OTEL_SDK_DISABLED="true")
        assert not folder.exists()
    return code, said


@pytest.mark.parametrize(
    ("end", "worker"),
    # Of a program that was killed, or whose wait for the last export was interrupted, the companion still writes:
    # `tests/worker/test_companion.py` waits for its end.
    [(end, "thread") for end in ENDS] + [(end, "process") for end in ENDS if end.finished and len(end.signals) < 2],
    ids=str,
)
def test_end(end: End, worker: str, tmp_path: Path) -> None:
    """The same exit code and output as without torchotel, while its endpoint is a black hole; one warning a cause."""
    folder = tmp_path / "run"
    with misbehaving(silence) as port:
        variables = {"OTEL_EXPORTER_OTLP_TIMEOUT": "2", "TORCHOTEL_WORKER": worker}
        code, said, errors = run(end, f"http://127.0.0.1:{port}", folder, **variables)
    assert (code, said) == run_plain(end), errors
    assert "_handle.py" not in errors  # a further interrupt may hit the end of another library
    warnings = [line for line in errors.splitlines() if line.startswith("Could not")]
    assert len(warnings) == len(set(warnings)) <= 2
    lines = [line for path in sorted(folder.glob("trace-*")) for line in path.read_bytes().splitlines(keepends=True)]
    assert lines
    assert all(json.loads(line) for line in lines if line.endswith(b"\n"))
    assert all(line.endswith(b"\n") for line in lines[:-1])
    info = json.loads((folder / "run.json").read_bytes())
    if end.finished:
        spans = info["spans"]
        assert info["finished"]
        assert spans["spans_recorded"] == spans["spans_exported"] + spans["spans_dropped"] > 0
    assert list(open_run(folder).records())
