"""The queue that a real Collector keeps while Jaeger is away takes as much of a disk as the page of sizes says."""

import re
from pathlib import Path

import pytest
from support.backend_servers import collector, own_ports, running
from support.sizing_page import PAGE

import torchotel
from benchmarks.workloads import make

pytestmark = pytest.mark.real_server

STEPS = 80


def test_what_a_queue_takes_of_its_disk(tmp_path: Path) -> None:
    """For the spans of detailed steps, all of which it has acknowledged."""
    (figure,) = re.findall(r"of a queue on disk \| (\d+) \|", PAGE.read_text(encoding="utf-8"))
    workload, ports = make("transformer"), own_ports()
    with running(collector(tmp_path, ports)):
        endpoint = f"http://127.0.0.1:{ports.otlp_http}"
        with torchotel.instrument(endpoint=endpoint, detail="all", prometheus_port=None) as handle:
            for _ in range(STEPS):
                workload.step()
                assert handle.flush()
            spans = handle.stats()["spans_exported"]
        taken = sum(file.stat().st_blocks * 512 for file in (tmp_path / "data").rglob("*") if file.is_file())
    assert taken / spans == pytest.approx(int(figure), rel=0.25)
