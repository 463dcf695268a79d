"""A scrape of many layers: its duration, and the delay that it causes in the training."""

from __future__ import annotations

import json
import subprocess
import sys
from time import perf_counter_ns
from typing import Self

import torch

from benchmarks import workloads
from benchmarks.modes import FLUSH_S, paused_session, resumed
from benchmarks.parts import Conditions, Part, Table
from benchmarks.spread import spread
from benchmarks.stalls import longest_gap_ns

LAYERS = "500"
ROW = f"{LAYERS} layers"
WATCHED_NS = 300_000_000
TIME, DELAY, NO_DELAY = "ms per scrape", "longest delay, ms", "without scrapes, ms"
_CLIENT = """
import json, sys, time
from urllib.request import urlopen
for line in sys.stdin:
    times, size = [], 0
    for _ in range(int(line)):
        start_ns = time.perf_counter_ns()
        with urlopen(sys.argv[1]) as answer:
            size = len(answer.read())
        times.append((time.perf_counter_ns() - start_ns) / 1e6)
        time.sleep(0.05)
    print(json.dumps([times, size]), flush=True)
"""


def part() -> Part:
    """Scrape from another process, with an idle and with a busy training thread."""
    return Part(
        "scrape",
        "A scrape of 500 layers",
        "Measured by another process, while no training runs. The delay is the longest wait between two small"
        " operators of the training thread during five scrapes, or during the same time without scrapes.",
        _measure,
    )


def _measure(conditions: Conditions) -> Table:
    workload = workloads.make(LAYERS)
    with paused_session(conditions.sink, detail="all") as session:
        with resumed(session):
            for _ in range(3):
                workload.step()
        session.flush(FLUSH_S)
        with _Client(f"http://127.0.0.1:{session.prometheus_port}/metrics") as client:
            client.scrape(3)  # the first scrapes fill the caches of the layers
            rounds = conditions.rounds(10)
            scraped = [client.scrape(4) for _ in range(rounds)]
            delays = [_delay_ms(client) for _ in range(rounds)]
    conditions.sink.count()
    return {
        ROW: {
            TIME: spread([time_ms for times_ms, _ in scraped for time_ms in times_ms]),
            DELAY: spread([during for during, _ in delays]),
            NO_DELAY: spread([alone for _, alone in delays]),
            "KiB": scraped[-1][1] / 1024,
        }
    }


class _Client:
    """Scrapes from a separate process until the block ends."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-c", _CLIENT, url]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # closes its input, which ends it

    def begin(self, times: int) -> None:
        """Start scraping without waiting."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{times}\n")
        self._process.stdin.flush()

    def end(self) -> tuple[list[float], int]:
        """Wait for the scrapes. Return their durations and the size of the last response."""
        assert self._process.stdout is not None
        times_ms, size = json.loads(self._process.stdout.readline())
        return times_ms, size

    def scrape(self, times: int) -> tuple[list[float], int]:
        """Scrape, and wait for the result."""
        self.begin(times)
        return self.end()


def _delay_ms(client: _Client) -> tuple[float, float]:
    """Return the longest gap during scrapes, and during the same time after them."""
    small = torch.zeros(8)
    client.begin(5)
    during_ns = longest_gap_ns(small, perf_counter_ns() + WATCHED_NS)
    client.end()
    return during_ns / 1e6, longest_gap_ns(small, perf_counter_ns() + WATCHED_NS) / 1e6
