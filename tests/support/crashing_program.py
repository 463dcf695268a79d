"""A training that ends without a shutdown, or stalls: `crashing_program.py FOLDER PLACE END`.

It prints the id of its companion and the port of its metrics, and waits for a line before the step that ends it. END is
what happens at PLACE.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import torchotel
from torchotel._lifecycle import LIFECYCLE

STEPS = 5
"""Whole steps before the end."""


def die_and_leave_a_child() -> None:
    """Fork a child that lives until the standard input ends, and kill this process."""
    if os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def die_with_a_garbled_page() -> None:
    """Fill the status page with possible kinds and times at random, and kill this process."""
    handle = LIFECYCLE.handle
    assert handle is not None
    backend: Any = handle.session._backend if handle.session is not None else None
    now_ns, words = time.perf_counter_ns(), random.Random(1)
    for index in range(1, len(backend._channel.page)):
        backend._channel.page[index] = words.choice([words.randrange(16), now_ns - words.randrange(1_000_000)])
    os.kill(os.getpid(), signal.SIGKILL)


def die_with_the_companion() -> None:
    """Kill the companion when it has noted the open step and recorded the others, and then this process."""
    handle = LIFECYCLE.handle
    assert handle is not None
    assert handle.session is not None
    assert handle.session.companion_pid is not None
    assert handle.record_folder is not None
    for name, number in (("metrics.jsonl", STEPS - 1), ("unsent.jsonl", STEPS)):
        file = handle.record_folder / name
        while not file.exists() or f'"number": {number},' not in file.read_text():
            time.sleep(0.05)
    os.kill(handle.session.companion_pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def allocate() -> None:
    """Take memory until there is none."""
    taken = []
    while True:
        taken.append(bytearray(10 * 2**20))


def allocate_within_a_limit() -> None:
    """Take memory until the limit of the address space, which has room for little more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + 200 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    allocate()


def wait_for_a_line() -> None:
    """Wait for a line of the standard input."""
    sys.stdin.readline()


def wait_with_the_gil() -> None:
    """Wait for a byte of the standard input in C, which holds the GIL."""
    ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)


ENDS: dict[str, Callable[[], object]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGSEGV": lambda: ctypes.string_at(0),
    "_exit": lambda: os._exit(3),
    "abort": os.abort,
    "SIGKILL of both": die_with_the_companion,
    "fork": die_and_leave_a_child,
    "garbage": die_with_a_garbled_page,
    "lack of memory": allocate,
    "lack of address space": allocate_within_a_limit,
    "nothing": lambda: None,
    "wait": wait_for_a_line,
    "wait with the GIL": wait_with_the_gil,
}


class Ending(torch.autograd.Function):
    """Return the input, and end in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, end: Callable[[], object]) -> Tensor:
        """Return the input."""
        ctx.end = end
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """End, or return the gradient."""
        ctx.end()
        return gradients[0], None


class Program(nn.Module):
    """The model and the training, which ends at its place in the step after the whole ones.

    Args:
        place: layer | forward | backward | fetch | optimizer | evaluation | between.
        end: What happens there.
    """

    def __init__(self, place: str, end: Callable[[], object]) -> None:
        super().__init__()
        self._layer, self._place, self._end = nn.Linear(4, 1), place, end
        self._layer.register_forward_pre_hook(lambda *_: self.happen("layer"))
        self.is_last = False

    def happen(self, place: str) -> None:
        """End the program, if this is the place."""
        if self.is_last and place == self._place:
            self._end()

    def forward(self, x: Tensor) -> Tensor:
        """Call the layer."""
        y: Tensor = self._layer(x)
        self.happen("forward" if torch.is_grad_enabled() else "evaluation")
        return Ending.apply(y, lambda: self.happen("backward")) if torch.is_grad_enabled() else y

    def train_steps(self, *, fetches: bool) -> None:
        """Train the whole steps and one more."""
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        optimizer.register_step_pre_hook(lambda *_: self.happen("optimizer"))
        rows = Rows(self)
        for x in DataLoader(rows, 1) if fetches else map(rows.__getitem__, range(len(rows))):
            if self._place == "evaluation":
                with torch.no_grad():
                    self(x)
            self.happen("between")
            self(x).sum().backward()
            optimizer.step()


class Rows(Dataset[Tensor]):
    """The data: a row for each step.

    Args:
        program: Ends in a fetch, if that is its place.
    """

    def __init__(self, program: Program) -> None:
        self._program = program

    def __len__(self) -> int:
        return STEPS + 1

    def __getitem__(self, index: int) -> Tensor:
        self._program.is_last = index == STEPS
        if self._program.is_last:
            sys.stdin.readline()
        self._program.happen("fetch")
        return torch.ones(4)


def main() -> None:
    """Train until the end."""
    folder, place, end = sys.argv[1:]
    handle = torchotel.instrument(record=folder, prometheus_port=0)
    companion_pid = None if handle.session is None else handle.session.companion_pid
    sys.stdout.write(f"{companion_pid} {handle.prometheus_port}\n")
    sys.stdout.flush()
    Program(place.removesuffix(" after a fetch"), ENDS[end]).train_steps(fetches=place.endswith("fetch"))


if __name__ == "__main__":
    main()
