"""A process that is forked while torchotel's worker loads a library."""

from pathlib import Path

import pytest
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
from torchotel._utils import fork_guard

fork_guard.LONGEST_S = 1e6
with fork_guard.Loading():
    if os.fork() == 0:
        os._exit(0)
print("forked")
"""
TOO_LONG = """
import os
from torchotel._utils import fork_guard

fork_guard.LONGEST_S = 0.01
loading = fork_guard.Loading()
for _ in range(2):
    if os.fork() == 0:
        os._exit(0)
    fork_guard.LONGEST_S = 1e6
print("forked")
"""
INTERRUPTED = """
import os, signal, threading

os.register_at_fork(before=lambda: threading.Event().wait(0.5))  # longer than the pause before it comes again
from torchotel._utils import fork_guard

loading = fork_guard.Loading()
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    if os.fork() == 0:
        os._exit(0)
    threading.Event().wait()  # only a real signal ends that
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_child_may_load_what_the_worker_was_loading(tmp_path: Path) -> None:
    """A DataLoader's workers are forked soon after the start, and may load the same library."""
    done = python("-c", STARTED, cwd=tmp_path)
    assert done.stdout == "7\n", done.stderr


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        pytest.param(OWN, "forked\n", id="a library forks while it is loaded"),
        pytest.param(TOO_LONG, "forked\n", id="what takes too long is waited for once"),
        pytest.param(INTERRUPTED, "interrupted\n", id="an interrupt meanwhile comes after the fork"),
    ],
)
def test_a_fork_waits_no_longer_than_it_must(program: str, printed: str, tmp_path: Path) -> None:
    """A loader forks many times; and what is raised before a fork Python only prints, and forks all the same."""
    done = python("-c", program, cwd=tmp_path)
    assert done.stdout == printed, done.stderr
