"""Several ranks on this machine, in processes that are forked from one that has torch: its import takes 3 s."""

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from support.commands import TIMEOUT_S, environment
from support.forked_python import ForkedProgram

PRELOADED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
]


def next_line(output: IO[str]) -> str:
    """Return the next line that a rank prints, without those of Gloo, which torch 2.9 prints to the standard output."""
    return next(line for line in output if not line.startswith("[Gloo]"))


def call_on_ranks(function: Callable[..., None], ranks: int, folder: Path, *args: object) -> None:
    """Call a function on each rank of a Gloo group; an exception of any rank raises.

    Args:
        function: Called with the rank and the arguments; found by its name, as pickle does.
        ranks: How many processes.
        folder: Where the ranks find each other.
        args: Further arguments.
    """
    set_forkserver_preload(PRELOADED)
    start_processes(_on_rank, (ranks, folder, function, args), ranks, start_method="forkserver")


def _on_rank(rank: int, ranks: int, folder: Path, function: Callable[..., None], args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    function(rank, *args)
    dist.destroy_process_group()


def start_ranks(*words: str, ranks: int, cwd: Path, **variables: str) -> list[ForkedProgram]:
    """Start a program on each rank, with the variables of a launcher."""
    common = environment(**{"TORCHOTEL_RUN_ID": "a job", **variables}, WORLD_SIZE=str(ranks), OMP_NUM_THREADS="1")
    return [ForkedProgram(words, cwd, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)]


def run_ranks(*words: str, ranks: int, cwd: Path, **variables: str) -> str:
    """Run a program on each rank, and return what all of them wrote to the standard error."""
    programs = start_ranks(*words, ranks=ranks, cwd=cwd, **variables)
    with ThreadPoolExecutor(ranks) as threads:
        waits = [threads.submit(program.wait, TIMEOUT_S) for program in programs]
        for ended in as_completed(waits):
            if ended.result()[0]:  # the other ranks would wait for it
                for program in programs:
                    with suppress(ProcessLookupError):
                        program.send_signal(signal.SIGKILL)
    errors = "".join(wait.result()[2] for wait in waits)
    assert not any(wait.result()[0] for wait in waits), errors
    return errors
