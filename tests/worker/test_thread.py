"""The worker thread."""

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import torchotel
from torchotel.runs import open_run


def test_if_no_thread_can_be_started_the_shutdown_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From version 3.12 on, Python starts no thread at its end, when a process may have its first record."""

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("torchotel"):
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", refuse)
    folder = tmp_path / "run"
    with torchotel.instrument(record=folder, traces_exporter="none", prometheus_port=None, worker="thread") as handle:
        for _ in range(3):
            nn.Linear(2, 1)(torch.ones(1, 2)).sum().backward()
        assert not handle.flush(0.1)
    assert "No thread can be started" in caplog.text
    assert [record.number for record in open_run(folder).records()] == [0, 1, 2]
    assert handle.stats()["spans_dropped"] == 0
