"""Trains on several ranks, with what may make their counts of steps differ: `rank_steps_program.py WAY`."""

import json
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchotel

STEPS = 48


class Model(nn.Module):
    """Two layers; in some forwards the program asks which span is current."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.asks = False
        self.asked: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.asks:
            self.asked.append(f"{trace.get_current_span().get_span_context().trace_id:032x}")
        result: Tensor = self.second(self.first(x).relu())
        return result


def main(way: str, at_the_end: ExitStack) -> None:
    """Train in one way."""
    rank = dist.get_rank()
    model = Model()
    wrapped = model if way in {"mesh", "pairs"} else DistributedDataParallel(model)
    group: Any = dist.new_group(list(range(dist.get_world_size())), group_desc="all of us") if way == "mesh" else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worker = handle.stats()["worker"]
    assert worker is not None
    for number in range(STEPS):
        model.asks = way == "evaluations" and number % 4 == 3
        wrapped(torch.full((2, 8), float(rank))).sum().backward()
        model.asks = False
        if way == "pairs":
            _exchange(model, rank)
        if way == "mesh":
            _sum_gradients(model, group)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and number % 3 == 0:  # the other ranks wait in their next collective
            with torch.no_grad():
                model(torch.ones(1, 8))
        if way == "restart" and number == 8 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(3)
        if way == "stopped companion" and number == 8 and rank == 1:
            at_the_end.callback(os.kill, worker["pid"], signal.SIGCONT)
            os.kill(worker["pid"], signal.SIGSTOP)
    Path(f"asked-{rank}.json").write_text(json.dumps(model.asked))


def _exchange(model: Model, rank: int) -> None:
    """Sum gradients over all ranks, and let the first two of them exchange more."""
    _sum_gradients(model)
    dist.monitored_barrier()  # sends inside, which no hook sees
    if rank == 0:
        dist.send(torch.ones(3), 1)
    elif rank == 1:
        dist.recv(torch.ones(3), 0)


def _sum_gradients(model: Model, group: Any = None) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=group)


torch.set_num_threads(1)
if sys.argv[1] == "provider":
    trace.set_tracer_provider(TracerProvider())
handle = torchotel.instrument(record="run", metrics_exporter="none", detail=2)
# The store of torchrun still has the addresses of gloo from before a restart: half of the restarts fail (torch 2.15).
store = Path(f"store-{os.environ.get('TORCHELASTIC_RESTART_COUNT')}").absolute()
dist.init_process_group(
    "gloo",
    init_method=f"file://{store}",
    rank=int(os.environ["RANK"]),
    world_size=int(os.environ["WORLD_SIZE"]),
)
with ExitStack() as at_the_end:
    main(sys.argv[1], at_the_end)
torchotel.uninstrument()
dist.destroy_process_group()
