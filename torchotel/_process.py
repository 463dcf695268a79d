"""What kind of process this is."""

import multiprocessing
import sys


def is_child() -> bool:
    """Tell whether multiprocessing started this process, also while it runs the user's script again.

    It has no `parent_process()` yet then, but a name of its own already.
    """
    return multiprocessing.parent_process() is not None or multiprocessing.current_process().name != "MainProcess"


def is_fork_server() -> bool:
    """Tell whether this process only forks others for multiprocessing: the program's `__main__` may be run in it."""
    return any(word.startswith("from multiprocessing.forkserver import main") for word in sys.orig_argv)
