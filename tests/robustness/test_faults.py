"""Whatever fails, the program computes what it would have, waits for nothing, and every span is counted.

Rows are faults, columns are claims: `Outcome.check` holds all of them on each row.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support import endpoint_faults, fault_training_loops, internal_faults
from support.otlp_http_receiver import Receiver
from torch import Tensor

import torchotel
from torchotel.worker.buffer import Buffer
from torchotel.worker.stats import Stats
from torchotel.worker.thread import Worker

LIMIT_S = 3.0
"""Given to `shutdown`."""
Loop = Callable[[], list[Tensor]]


@cache
def uninstrumented(loop: Loop) -> list[Tensor]:
    """Give what a loop computes without torchotel."""
    return loop()


class Outcome(NamedTuple):
    """What became of a program and of what was to be recorded of it."""

    loop: Loop
    computed: list[Tensor]
    stats: Stats
    shutdown_s: float
    messages: list[str]
    """Warnings and errors of torchotel's logger, by their first line."""

    def check(self) -> None:
        """Hold every claim."""
        expected = uninstrumented(self.loop)
        assert len(self.computed) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(self.computed, expected, strict=True))
        assert len(self.messages) == len(set(self.messages)), self.messages
        ends = ("spans_exported", "spans_dropped", "spans_sampled_out")
        assert self.stats["spans_recorded"] == sum(self.stats[end] for end in ends), self.stats  # type: ignore[literal-required]  # they are its keys
        assert self.shutdown_s < LIMIT_S + 1.0  # the machine may be busy


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Give what torchotel has said so far."""
    with caplog.at_level(logging.WARNING, "torchotel"):
        yield lambda: [record.getMessage().splitlines()[0] for record in caplog.records if record.name == "torchotel"]


def run(
    loop: Loop,
    endpoint: str,
    messages: Callable[[], list[str]],
    after: Callable[[], object] = lambda: None,
    **settings: Any,
) -> Outcome:
    """Train under `instrument()`, and end."""
    handle = torchotel.instrument(
        endpoint=endpoint, detail="all", gradient_norms=True, prometheus_port=None, **settings
    )
    computed = loop()
    after()
    handle.flush(1.0)
    began_s = time.monotonic()
    handle.shutdown(LIMIT_S)
    return Outcome(loop, computed, handle.stats(), time.monotonic() - began_s, messages())


# Endpoints.


@pytest.mark.parametrize("fault", endpoint_faults.FAULTS, ids=str)
def test_endpoint(
    fault: endpoint_faults.Fault, messages: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it takes nothing, too late or only a part, the loop ends before it has answered, and all is counted."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "20" if fault.arrives else "1")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    with endpoint_faults.faulty(fault) as endpoint:
        handle = torchotel.instrument(
            endpoint=endpoint.url, protocol=fault.protocol, detail="all", metrics_exporter="otlp"
        )
        fault_training_loops.train()
        handle.flush(0.5)
        endpoint.amid()
        computed = fault_training_loops.train()
        endpoint.after()
        if fault.arrives:
            assert handle.flush(30)
        began_s = time.monotonic()
        handle.shutdown(LIMIT_S)
        outcome = Outcome(fault_training_loops.train, computed, handle.stats(), time.monotonic() - began_s, messages())
    outcome.check()
    arrived, recorded = outcome.stats["spans_exported"], outcome.stats["spans_recorded"]
    assert {True: arrived == recorded, False: arrived == 0, None: 0 < arrived < recorded}[fault.arrives]
    assert bool(outcome.messages) == (outcome.stats["export_errors"] > 0), outcome.messages


# A worker that does not come.


def test_full_buffer(server: Receiver, messages: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop ends while the worker is held; the oldest steps make room and are counted, the newest arrive."""
    may_work = threading.Event()
    monkeypatch.setattr("torchotel.worker.backend.Buffer", lambda: Buffer(limit=200))
    drain = Worker._drain
    monkeypatch.setattr(Worker, "_drain", lambda worker: (may_work.wait(), drain(worker)))
    endpoint = server.url.removesuffix("/v1/traces")
    outcome = run(fault_training_loops.train, endpoint, messages, may_work.set, worker="thread")
    outcome.check()
    assert 0 < outcome.stats["spans_dropped"] < outcome.stats["spans_recorded"]
    assert outcome.stats["spans_exported"] == len(server.spans) > 0
    assert sum("because the buffer before the worker was full" in message for message in outcome.messages) == 1


# Errors of our own.


def test_flush_says_that_spans_were_lost(server: Receiver) -> None:
    """Also where they came to no exporter: once, and the next that loses nothing says so."""
    handle = torchotel.instrument(
        endpoint=server.url.removesuffix("/v1/traces"),
        detail="all",
        prometheus_port=None,
        metrics_exporter="none",
        worker="thread",
    )
    with internal_faults.breaking("tracing.trace_builder.TraceBuilder.build", 1):
        fault_training_loops.train()
        assert not handle.flush()
    fault_training_loops.train()
    assert handle.flush()
    handle.shutdown()
    assert 0 < handle.stats()["spans_dropped"] < handle.stats()["spans_recorded"]


def test_spans_of_an_exporter_that_cannot_be_created_are_dropped(messages: Callable[[], list[str]]) -> None:
    """The program is not told but by the log; the spans are counted, and `flush` returns False."""
    with internal_faults.breaking("exporters.factory._make_otlp", 0):
        handle = torchotel.instrument(detail="all", prometheus_port=None, metrics_exporter="none", worker="thread")
    fault_training_loops.train()
    assert not handle.flush()
    assert handle.flush(), "nothing was dropped since the last flush"
    handle.shutdown()
    assert 0 < handle.stats()["spans_recorded"] == handle.stats()["spans_dropped"]
    assert len(messages()) == 1


INSIDE = [
    *((fault_training_loops.train, place, only) for place in internal_faults.HOOKS for only in (0, 2)),
    *((fault_training_loops.train_compiled, place, only) for place in internal_faults.COMPILED for only in (0, 2)),
    *((fault_training_loops.train, place, 0) for place in internal_faults.ONCE),
]


@pytest.mark.filterwarnings("ignore")  # of what is deprecated where it is compiled
@pytest.mark.parametrize(("loop", "place", "only"), INSIDE)
def test_internal_error(
    loop: Loop, place: str, only: int, server: Receiver, messages: Callable[[], list[str]], tmp_path: Path
) -> None:
    """An error of torchotel's own, at each call of a function or at its second, reaches nobody but the log."""
    check_internal_error(place, only, loop, server, messages, record=tmp_path / "run")


@pytest.mark.parametrize("place", internal_faults.WORKER)
def test_internal_error_of_the_worker(
    place: str, server: Receiver, messages: Callable[[], list[str]], tmp_path: Path
) -> None:
    train = fault_training_loops.train
    check_internal_error(place, 0, train, server, messages, record=tmp_path / "run", worker="thread")


def check_internal_error(
    place: str, only: int, loop: Loop, server: Receiver, messages: Callable[[], list[str]], **settings: Any
) -> None:
    uninstrumented(loop)
    with internal_faults.breaking(place, only) as breakage:
        outcome = run(loop, server.url.removesuffix("/v1/traces"), messages, **settings)
        outcome.check()
    assert breakage.raised, "nothing has failed"
    assert outcome.messages, "nobody was told"
