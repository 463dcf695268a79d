"""Signals come at any time, and their handlers end or flush the recording."""

from pathlib import Path

import pytest
from support import commands

pytestmark = pytest.mark.program

PROGRAM = """
import signal, socket, torch, torchotel
silent = socket.create_server(("127.0.0.1", 0))  # takes connections and says nothing
handle = torchotel.instrument(endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}", detail="all")
torch.nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
signal.signal(signal.SIGALRM, lambda *_: (HANDLER, print("handled")))
signal.setitimer(signal.ITIMER_REAL, 0.5)
handle.shutdown(timeout_s=2)
stats = handle.stats()
assert stats["spans_recorded"] == stats["spans_dropped"] > 0, stats
"""


@pytest.mark.parametrize("handler", ["handle.shutdown(1)", "torchotel.uninstrument()", "handle.flush(0.1)"])
def test_handler_during_shutdown(handler: str, tmp_path: Path) -> None:
    """A second shutdown on the same thread, in a signal's handler, does nothing, and the first goes on."""
    program = PROGRAM.replace("HANDLER", handler)
    done = commands.forked_python("-c", program, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr
