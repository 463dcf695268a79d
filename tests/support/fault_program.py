"""A training program that meets its end: `fault_program.py WHAT ENDPOINT FOLDER`, with or without torchotel."""

from __future__ import annotations

import atexit
import hashlib
import os
import resource
import signal
import sys
import threading
from itertools import count
from pathlib import Path

import torch
from torch import nn

import torchotel

LIMIT = 30


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


_BUILDING = threading.Lock()
"""All threads have one generator of random numbers."""

_STOP = threading.Event()
"""Ends a training that has no number of steps."""


def train(steps: int | None) -> str:
    """Train and give a digest of what was learnt.

    Without a number it goes on for ever, and the main thread says `go` once a step is on disk.
    """
    with _BUILDING:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    gone = steps is not None or threading.current_thread() is not threading.main_thread()
    for number in count():
        if number == steps or _STOP.is_set():
            break
        if not gone and on_disk():
            gone = True
            say("go")
            if sys.argv[1] == "os._exit":
                os._exit(3)
        net(torch.full((2, 4), number % 7 / 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in net.state_dict().values())).hexdigest()


def on_disk() -> bool:
    """Tell whether the run file has a step, which comes after its first trace; without torchotel there is none."""
    folder = Path(sys.argv[3])
    return not folder.exists() or (folder / "metrics.jsonl").stat().st_size > 0


def fork() -> None:
    """Train in the midst of a child, too."""
    say(train(LIMIT))
    child = os.fork()
    if child == 0:
        say(train(LIMIT))
        sys.exit(7)
    say(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])} {train(LIMIT)}")


def stop(thread: threading.Thread) -> None:
    """Let a training that goes on for ever end.

    A thread that is within torch when the interpreter goes aborts the process, with and without torchotel.
    """
    _STOP.set()
    thread.join()


def main() -> None:
    """Train until what is wanted happens."""
    if sys.argv[1] == "a full disk":  # an error from the system amid a line, which needs no rights to set up
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    torch.set_num_threads(1)  # a child that is forked has no other
    what, endpoint, folder = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell has put into the background
    if what == "trains in a later atexit":
        atexit.register(lambda: say(train(LIMIT)))
    beside = threading.Thread(target=train, args=(None,), daemon=True)
    if what == "a daemon thread trains on":
        atexit.register(stop, beside)  # runs after torchotel has shut down
    torchotel.instrument(endpoint=endpoint, record=folder, detail="all", prometheus_port=None)
    if what == "trains in an earlier atexit":
        atexit.register(lambda: say(train(LIMIT)))
    if what == "ends in order at SIGTERM":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if what == "fork":
        fork()
    elif what == "a daemon thread trains on":
        beside.start()
        say(train(LIMIT))
    elif what in {"os._exit", "is killed"}:
        train(None)
    else:
        try:
            train(LIMIT * 20 if what == "a full disk" else LIMIT if "atexit" in what else None)
        except KeyboardInterrupt:
            say("interrupted")
            raise


if __name__ == "__main__":
    main()
