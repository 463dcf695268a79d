"""The garbage collector at the start: it does not look through hundreds of thousands of objects for what only comes."""

import gc
import os
import subprocess
import sys

import pytest

from torchotel._utils.gc_pause import uncollected

PROGRAM = """
import gc, sys, threading, torch, torchotel
main, within = threading.main_thread().ident, set()

def note(phase, info):
    frame = sys._current_frames()[main]  # the worker's collections are seen too
    while frame is not None:
        within.add(frame.f_code.co_name)
        frame = frame.f_back

gc.set_threshold(50, 2, 2)
gc.callbacks.append(note)
torchotel.instrument(traces_exporter="none", metrics_exporter="none")
print("start" in within, gc.isenabled())
"""


def test_starting_brings_on_no_collection() -> None:
    """None before it is over, though hundreds of modules and classes are made."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, check=True)  # ours
    assert done.stdout == "False True\n"


@pytest.mark.parametrize("on", [True, False])
def test_it_is_left_as_it_was(*, on: bool) -> None:
    if not on:
        gc.disable()
    try:
        with uncollected():
            assert not gc.isenabled()
        assert gc.isenabled() == on
    finally:
        gc.enable()


def test_a_child_that_is_forked_meanwhile_collects() -> None:
    """By another thread of the program: in the child nobody would switch it on again."""
    with uncollected():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
        assert not gc.isenabled()
    assert os.waitpid(child, 0)[1] == 0
