"""A process that is forked while torchotel's worker loads a library."""

from pathlib import Path

from commands import python

STARTED = """
import os, sys, threading
import torchotel

under_way = threading.Event()

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "requests" and threading.current_thread() is not threading.main_thread():
            under_way.set()
            threading.Event().wait(0.3)  # a slow disk

sys.meta_path.insert(0, Slow())
torchotel.instrument(endpoint="http://127.0.0.1:9")
assert under_way.wait(60)
child = os.fork()
if child == 0:
    import requests  # Python's lock of an import that is under way is never let go in a child
    os._exit(7)
threading.Timer(30, os.kill, (child, 9)).start()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""
OWN = """
import os
from torchotel import _loading

_loading.LONGEST_S = 1e6
with _loading.Loading():
    if os.fork() == 0:
        os._exit(0)
print("forked")
"""
TOO_LONG = """
import os
from torchotel import _loading

_loading.LONGEST_S = 0.01
loading = _loading.Loading()
for _ in range(2):
    if os.fork() == 0:
        os._exit(0)
    _loading.LONGEST_S = 1e6
print("forked")
"""
INTERRUPTED = """
import os, signal, threading
from torchotel import _loading

loading = _loading.Loading()
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    if os.fork() == 0:
        os._exit(0)
    threading.Event().wait(60)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_child_may_load_what_the_worker_was_loading(tmp_path: Path) -> None:
    """A DataLoader's workers are forked soon after the start, and may load the same library."""
    done = python("-c", STARTED, cwd=tmp_path)
    assert done.stdout == "7\n", done.stderr


def test_a_thread_does_not_wait_for_what_it_loads_itself(tmp_path: Path) -> None:
    """A library may fork while it is loaded."""
    done = python("-c", OWN, cwd=tmp_path)
    assert done.stdout == "forked\n", done.stderr


def test_what_takes_too_long_is_waited_for_once(tmp_path: Path) -> None:
    """Each of a loader's workers is a fork."""
    done = python("-c", TOO_LONG, cwd=tmp_path)
    assert done.stdout == "forked\n", done.stderr


def test_an_interrupt_while_a_fork_waits_is_not_lost(tmp_path: Path) -> None:
    """Python prints what is raised before a fork, and forks all the same; the program is interrupted after it."""
    done = python("-c", INTERRUPTED, cwd=tmp_path)
    assert done.stdout == "interrupted\n", done.stderr
