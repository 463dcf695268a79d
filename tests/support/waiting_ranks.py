"""Two ranks on Gloo, of which one waits: `waiting_ranks.py FOLDER PLACE`, with the rank in RANK.

Each rank prints the port of its metrics. At the place, in the step after the first ones, both go on when FOLDER has a
file `end`.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import torchotel

STEPS = 3
"""Whole steps before the wait; each has a collective for each parameter."""
FOLDER, PLACE = Path(sys.argv[1]), sys.argv[2]
IS_LATE = os.environ["RANK"] == "1"


def wait_for_the_end() -> None:
    """Wait in Python until the file exists."""
    while not (FOLDER / "end").exists():
        time.sleep(0.05)


def one_is_late(gradient: torch.Tensor) -> None:
    """Let rank 1 come late to a collective."""
    if IS_LATE:
        wait_for_the_end()
    dist.all_reduce(gradient)


def one_is_late_in_a_phase(gradient: torch.Tensor) -> None:
    """Let rank 1 come late to a collective in the phase of an optimizer."""

    def closure() -> float:
        one_is_late(gradient)
        return 0.0

    torch.optim.SGD([gradient.clone()]).step(closure)


def operations_differ(gradient: torch.Tensor) -> None:
    """Call two operations, of which none can end."""
    if IS_LATE:
        dist.broadcast(gradient, 0)
    else:
        dist.all_reduce(gradient)


def both_are_slow(gradient: torch.Tensor) -> None:
    """Call collectives, one after the other, until the file exists."""
    ends = torch.zeros(1)
    while not ends:
        time.sleep(0.05)
        ends = torch.tensor([float((FOLDER / "end").exists())])
        dist.all_reduce(ends)


def one_is_shut_down(gradient: torch.Tensor) -> None:
    """Let rank 1 end the recording, and come late to a collective."""
    if IS_LATE:
        torchotel.uninstrument()
        wait_for_the_end()
    dist.all_reduce(gradient)


PLACES: dict[str, Callable[[torch.Tensor], None]] = {
    "one is late": one_is_late,
    "one is late in a phase": one_is_late_in_a_phase,
    "operations differ": operations_differ,
    "both are slow": both_are_slow,
    "one is shut down": one_is_shut_down,
}


def main() -> None:
    """Train, and wait in the step after the whole ones."""
    torch.set_num_threads(1)
    handle = torchotel.instrument(record=FOLDER / "run", prometheus_port=0)
    sys.stdout.write(f"{handle.prometheus_port}\n")
    sys.stdout.flush()
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/store", rank=int(os.environ["RANK"]), world_size=2)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS + 1):
        model(torch.ones(2, 4)).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            if step == STEPS and parameter is model.bias:
                PLACES[PLACE](parameter.grad)
            else:
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
