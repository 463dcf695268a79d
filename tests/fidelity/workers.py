"""Subjects checked in processes beside each other; one that ends its process is told, and the others go on."""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from fidelity.table import Key, Line, failed


def lines(keys: Sequence[Key], line_of: Callable[[Key], Line], processes: int) -> Iterator[Line]:
    """Yield the lines of subjects as they come."""
    waiting = iter(keys)
    running: dict[Future[Line], tuple[Key, ProcessPoolExecutor]] = {}

    def begin(worker: ProcessPoolExecutor) -> None:
        key = next(waiting, None)
        if key is None:
            worker.shutdown()
        else:
            running[worker.submit(line_of, key)] = key, worker

    for _ in range(processes):
        begin(_worker())
    while running:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            key, worker = running.pop(future)
            try:
                line = future.result()
            except BrokenProcessPool:
                line, worker = failed(key, "its process ended"), _worker()
            begin(worker)
            yield line


def _worker() -> ProcessPoolExecutor:
    """Make a pool of one process: where it breaks, it is known what ran."""
    return ProcessPoolExecutor(1, get_context("spawn"), _quiet)


def _quiet() -> None:
    """Log no warnings: what can't be seen of some subjects is known."""
    logging.getLogger("torchotel").setLevel(logging.ERROR)
