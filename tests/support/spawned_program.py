"""A child whose companion starts with the first record: `spawned_program.py FOLDER ENDPOINT WHAT`."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchotel
from support.companion_program import say
from torchotel._api import start_handle
from torchotel._handle import Handle
from torchotel.worker.supervisor import CompanionBackend


def train() -> None:
    """Train two steps."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def fork(handle: Handle) -> None:
    """Print what a forked child has."""
    if os.fork() == 0:
        say(seen(handle))
        os._exit(0)
    os.wait()


def kill_in_backward() -> None:
    """Kill this process in a backward."""
    y = nn.Linear(4, 4)(torch.ones(2, 4))
    y.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    y.sum().backward()


def refuse(*_: object, **__: object) -> None:
    """Fail as at the limit of processes."""
    raise BlockingIOError("Resource temporarily unavailable")


def interrupt_the_start() -> None:
    """Let Ctrl-C arrive in the last part of a companion's start, and train through it."""
    original = CompanionBackend.fix_identity

    def interrupt(_: CompanionBackend) -> None:
        replace(original)
        raise KeyboardInterrupt

    replace = partial(setattr, CompanionBackend, "fix_identity")
    replace(interrupt)
    with suppress(KeyboardInterrupt):
        train()
        say("not interrupted")


def interrupted(handle: Handle) -> Callable[..., subprocess.Popen[bytes]]:
    """Return a `Popen` during which a signal handler trains and flushes."""

    def handler(*_: object) -> None:
        train()
        say("flushed amid the start:", handle.flush())

    def popen(*words: Any, **settings: Any) -> subprocess.Popen[bytes]:
        vars(subprocess)["Popen"] = original
        signal.raise_signal(signal.SIGUSR1)
        return original(*words, **settings)

    original = subprocess.Popen
    signal.signal(signal.SIGUSR1, handler)
    return popen


def seen(handle: Handle) -> list[bool]:
    """Return whether there is a companion, a port and a folder; nothing if torchotel is off."""
    if handle.session is None:
        return []
    found = handle.session.companion_pid, handle.prometheus_port, handle.record_folder
    return [one is not None for one in found]


def run(folder: str, endpoint: str, what: str) -> None:
    """Instrument this child, and print what there is before and after the first record."""
    if what == "zero code":
        start_handle({"record": folder + "-of-zero-code"}, None, zero_code=True, defer_start=True)
    handle = torchotel.instrument(worker="process", record=folder, endpoint=endpoint)
    say(seen(handle), handle.flush(), handle.stats()["worker"])
    before_the_start: dict[str, Callable[[], object]] = {
        "fork": lambda: fork(handle),
        "no folder": Path(folder).touch,
        "handler": lambda: vars(subprocess).update(Popen=interrupted(handle)),
        "closed streams": lambda: os.close(0),
        "kill the first step": kill_in_backward,
        "interrupt": interrupt_the_start,
        "no process": lambda: vars(subprocess).update(Popen=refuse),
    }
    before_the_start.get(what, lambda: None)()
    if what != "idle":
        torchotel.log(learning_rate=0.1)  # before the first step
    if what == "another thread":
        training = threading.Thread(target=train)
        training.start()
        training.join()
    elif what != "idle":
        train()
    complete = handle.flush()
    if what == "kill":
        layer = nn.Linear(4, 4)
        layer.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        layer(torch.ones(2, 4))
    say(seen(handle), complete)
    handle.shutdown()
    stats = handle.stats()
    say(stats["steps"], stats["spans_recorded"] == stats["spans_exported"], stats["spans_dropped"] > 0)


if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=run, args=sys.argv[1:])
    child.start()
    child.join()
    if sys.argv[3].startswith("kill"):
        info = Path(sys.argv[1], "run.json")
        while not (info.exists() and b"process_ended" in info.read_bytes()):
            time.sleep(0.05)
