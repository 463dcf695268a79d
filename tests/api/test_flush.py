"""What a flush brings out: all that was handed over before it was asked for."""

from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from torchotel._records import Record, StepRecord
from torchotel._session import Session
from torchotel.config.config import Config
from torchotel.exporters.base import InMemoryExporter
from torchotel.worker.backend import ThreadBackend


class Interrupted(InMemoryExporter):
    """Lets something happen while the worker hands on what it has just taken."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], object] | None = None
        self.pushed: list[int] = []
        """How many traces had come by each push."""

    def push(self) -> None:
        self.pushed.append(len(self.traces))
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()


def test_a_step_that_ends_just_before_a_flush_is_in_it() -> None:
    """It may come when the worker has emptied its buffer, and the flush before it looks whether there is one."""
    exporter, records = Interrupted(), list[Record]()
    session = Session(Config(detail="off", metrics_exporter=()), None, exporter.exporters, on_record=records.append)
    try:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert session.flush(10)
        backend = session._backend
        assert isinstance(backend, ThreadBackend)
        worker = backend._worker

        def step_and_flush() -> None:
            worker._buffer.append(cast("StepRecord", records[0]))
            worker.flush(0)

        before = len(exporter.traces)
        exporter.meanwhile = step_and_flush
        pushes = len(exporter.pushed)
        assert session.flush(10)
        assert session.flush(10)  # behind the one that was asked for meanwhile
        # The push that was interrupted, and the one before the first answer.
        assert exporter.pushed[pushes : pushes + 2] == [before, before + 1]
    finally:
        session.stop(10)
