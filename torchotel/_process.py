"""What kind of process this is."""

import multiprocessing


def is_child() -> bool:
    """Tell whether multiprocessing started this process, also while it runs the user's script again.

    It has no `parent_process()` yet then, but a name of its own already.
    """
    return multiprocessing.parent_process() is not None or multiprocessing.current_process().name != "MainProcess"
