"""The states of torchotel in a process, and what leads from one to another."""

import subprocess
import sys

import pytest

import torchotel
from torchotel._lifecycle import DISABLED_AFTER_FORK, LIFECYCLE, NOT_STARTED, PAUSED, RUNNING, SHUT_DOWN

STATES = """
import os
from torchotel._lifecycle import LIFECYCLE as lifecycle
from torchotel._auto_instrument import start_with_torch
import torchotel

def show():
    print(lifecycle.state, lifecycle.session is not None, flush=True)

def fork(action=lambda: None):
    child = os.fork()
    if child == 0:
        action()
        show()
        os._exit(0)
    os.waitpid(child, 0)

settings = {"prometheus_port": None, "traces_exporter": "none", "detail": "off"}
show()
fork()
start_with_torch(settings, defer_start=True, failed=print)
show()
fork()
torchotel.uninstrument()
show()
start_with_torch(settings, defer_start=True, failed=print)
import torch
show()
fork()
fork(lambda: torchotel.instrument(**settings))
torchotel.uninstrument()
show()
"""


def test_a_handle_runs_pauses_and_shuts_down() -> None:
    handle = torchotel.instrument(traces_exporter="none", detail="off")
    assert (LIFECYCLE.state, LIFECYCLE.handle) == (RUNNING, handle)
    handle.pause()
    assert LIFECYCLE.state == PAUSED
    assert torchotel.instrument() is handle
    assert LIFECYCLE.state == PAUSED
    handle.resume()
    assert LIFECYCLE.state == RUNNING
    handle.shutdown()
    assert (LIFECYCLE.state, LIFECYCLE.handle, LIFECYCLE.session) == (SHUT_DOWN, None, None)


@pytest.mark.parametrize("call", ["pause", "resume", "shutdown"])
def test_the_handle_of_an_earlier_run_changes_nothing(call: str) -> None:
    earlier = torchotel.instrument(traces_exporter="none", detail="off")
    earlier.shutdown()
    with torchotel.instrument(traces_exporter="none", detail="off") as handle:
        getattr(earlier, call)()
        assert (LIFECYCLE.state, LIFECYCLE.handle) == (RUNNING, handle)


def test_zero_code_and_forks() -> None:
    """A forked child is disabled until it calls `instrument()`; a fork before the first start changes nothing."""
    done = subprocess.run([sys.executable, "-c", STATES], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        f"{NOT_STARTED} False",
        f"{NOT_STARTED} False",
        "waiting for torch False",
        f"{DISABLED_AFTER_FORK} False",
        f"{NOT_STARTED} False",
        f"{RUNNING} True",
        f"{DISABLED_AFTER_FORK} False",
        f"{RUNNING} True",
        f"{SHUT_DOWN} False",
    ]
