"""The figures that the page of sizes counts with are those of a real run."""

from functools import partial

import pytest
from support.otlp_http_receiver import Receiver
from support.scraped_metrics import scrape
from support.sizing_page import figures

import torchotel
from benchmarks.workloads import make
from torchotel._utils.distributed import Identity
from torchotel.tracing.shared_trace import SharedTraces

STEPS = 12


def wire_bytes(server: Receiver) -> float:
    """Give the bytes of a span on the wire, without the first request, which has the run's span too."""
    requests = server.requests[1:]
    return sum(int(one.headers["Content-Length"]) for one in requests) / sum(len(one.spans()) for one in requests)


def test_a_plain_step(server: Receiver) -> None:
    """Five spans, as there is no DataLoader, and the series that every rank has."""
    workload = make("tiny")
    with torchotel.instrument(
        endpoint=server.url.removesuffix("/v1/traces"), detail="off", prometheus_port=0
    ) as handle:
        for _ in range(STEPS):
            workload.step()
            assert handle.flush()
        series = scrape(handle.prometheus_port).series
    assert handle.stats()["spans_recorded"] == 5 * STEPS  # the first has no `torch.between`, but `torch.run` is there
    target_info, on_a_gpu = 1, 3
    assert len(series) + target_info + on_a_gpu == figures()["RANK_SERIES"]
    expected = figures()["SPAN_WIRE_BYTES"] + figures()["REQUEST_WIRE_BYTES"] / 5
    assert wire_bytes(server) == pytest.approx(expected, rel=0.25)


def test_a_detailed_step(server: Receiver) -> None:
    """Two spans more for each module call; the bytes are those of a model of 124 calls, with their shapes."""
    workload = make("transformer")
    with torchotel.instrument(
        endpoint=server.url.removesuffix("/v1/traces"), detail="all", prometheus_port=0
    ) as handle:
        for _ in range(STEPS):
            workload.step()
            assert handle.flush()
        series = scrape(handle.prometheus_port).series
    assert handle.stats()["spans_recorded"] == (5 + 2 * workload.calls) * STEPS
    called, own = 124, 99
    assert sum(name.startswith("torch_module_") for name, _ in series) == 4 * called + own
    assert wire_bytes(server) == pytest.approx(figures()["SPAN_WIRE_BYTES"], rel=0.25)


@pytest.mark.parametrize("ranks", [1, 2, 5, 8, 9, 64, 300, 1000])
def test_the_spans_that_ranks_share(ranks: int) -> None:
    """The page has the sum of what each rank may add to the trace of a step."""
    run = figures()["Run"]("", ranks, 1, 10_000)
    spans = 0
    for rank in range(ranks):
        identity = Identity(rank, rank, ranks, "run", 0, "launch")
        spans += SharedTraces(partial(identity._replace)).max_spans(run.max_spans, (7, 0)) or 0
    assert run.spans(10_000) == spans
