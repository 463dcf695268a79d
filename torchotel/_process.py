"""What kind of process this is."""

import multiprocessing.process
import sys
from collections.abc import Callable
from typing import Any


def is_child() -> bool:
    """Tell whether multiprocessing started this process, also while it runs the user's script again.

    It has no `parent_process()` yet then, but a name of its own already.
    """
    return multiprocessing.parent_process() is not None or multiprocessing.current_process().name != "MainProcess"


def is_being_spawned() -> bool:
    """Tell whether this process is a child of multiprocessing that has not been given its task yet."""
    return is_child() and multiprocessing.parent_process() is None


def when_given_a_task(action: Callable[[], None]) -> None:
    """Run `action` when this process, which is being spawned, gets its task; not where that is a DataLoader's.

    The processes of multiprocessing have no public place for this; where the private one is gone, it runs at once.
    """
    process: Any = multiprocessing.process.BaseProcess
    bootstrap = getattr(process, "_bootstrap", None)
    if bootstrap is None:
        action()
        return

    def begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        process._bootstrap = bootstrap  # noqa: SLF001 - see above
        task = getattr(self, "_target", None)
        if getattr(task, "__module__", None) != "torch.utils.data._utils.worker":
            action()
        return bootstrap(self, *args, **kwargs)

    process._bootstrap = begin  # noqa: SLF001 - see above


def is_fork_server() -> bool:
    """Tell whether this process only forks others for multiprocessing: the program's `__main__` may be run in it."""
    return any(word.startswith("from multiprocessing.forkserver import main") for word in sys.orig_argv)
