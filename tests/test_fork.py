"""A process that is forked while torchotel's worker loads a library."""

from pathlib import Path

from commands import python

PROGRAM = """
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


def test_a_child_may_load_what_the_worker_was_loading(tmp_path: Path) -> None:
    """A DataLoader's workers are forked soon after the start, and may load the same library."""
    done = python("-c", PROGRAM, cwd=tmp_path)
    assert done.stdout == "7\n", done.stderr
