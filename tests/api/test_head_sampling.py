"""Head sampling by OTEL_TRACES_SAMPLER on the trace id, and what is kept late all the same."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.trace import get_current_span
from support.both_exports import looked
from support.otlp_http_receiver import Receiver, receiver
from support.recorded_training import Seen
from torch import nn

import torchotel
from torchotel._records import Error, StepRecord
from torchotel.sampling.tail import TailSampler


def _train(steps: int, **settings: Any) -> tuple[list[tuple[int, Any, Any]], dict[str, int]]:
    """Train; give trace id, number and reason of each step that arrived, and the counts."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with receiver() as server:
        endpoint = server.url.removesuffix("/v1/traces")
        with torchotel.instrument(endpoint=endpoint, metrics_exporter="none", **settings) as handle:
            for number in range(steps):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                if number == 3:
                    torchotel.log(loss=math.inf)
        roots = [span for span in server.spans if span.name == "torch.step"]
    arrived = []
    for span in roots:
        attributes = Seen(span).attributes
        reason = attributes.get("torch.kept.reason")
        arrived.append((int.from_bytes(span.trace_id), attributes["torch.step.number"], reason))
    return arrived, handle.stats()  # type: ignore[return-value] # all of these counts are whole


@pytest.mark.parametrize("sampler", ["traceidratio", "parentbased_traceidratio"])
def test_what_is_sampled_out_is_counted_and_what_is_interesting_is_kept(
    sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step whose loss went infinite is there, and says why."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    arrived, stats = _train(6, detail="all")
    assert [(number, reason) for _, number, reason in arrived] == [(3, "nan")]
    assert stats["steps"] == 6
    assert stats["spans_recorded"] == stats["spans_exported"] + stats["spans_sampled_out"]
    assert stats["spans_sampled_out"] >= 5 * 4


@pytest.mark.parametrize("sampler", ["traceidratio", "parentbased_traceidratio"])
def test_at_ratio_zero_the_span_of_the_run_is_not_sent(sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler takes nothing; only what torchotel keeps by itself arrives."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    with receiver() as server:
        torchotel.instrument(endpoint=server.url.removesuffix("/v1/traces"), metrics_exporter="none")
        nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
        torchotel.uninstrument()
        assert list(server.spans) == []


@pytest.mark.parametrize("sampler", ["always_off", "parentbased_always_off"])
def test_off_is_off(sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept, however interesting; steps are counted all the same."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    arrived, stats = _train(6, detail="all")
    assert arrived == []
    assert stats["steps"] == 6
    assert stats["spans_exported"] == 0


def test_the_ratio_decides_on_the_trace_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the SDK's sampler would, so that whoever else samples the same trace agrees."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    arrived, _ = _train(200, detail="off")
    bound = TraceIdRatioBased.get_bound_for_rate(0.5)
    by_head = [trace_id for trace_id, _, reason in arrived if reason is None]
    assert 50 < len(by_head) < 150
    assert all(trace_id & TraceIdRatioBased.TRACE_ID_LIMIT < bound for trace_id in by_head)


def test_evaluations_follow_their_callers_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a span that was sampled out there is none; the parent-based default keeps those under a sampled one."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    with looked("otlp") as look:
        model = nn.Linear(4, 4)
        left_out = TracerProvider(sampler=TraceIdRatioBased(0)).get_tracer("user")
        with torch.no_grad():
            with look.tracer.start_as_current_span("sampled"):
                model(torch.ones(1, 4))
            with left_out.start_as_current_span("left out"):
                model(torch.ones(1, 4))
            model(torch.ones(1, 4))
    assert look.above("torch.evaluation") == [["sampled"]]


def test_ids_that_are_given_out_carry_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's spans in a step that is sampled out are sampled out with it."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    with looked("otlp") as look:
        model = nn.Linear(4, 4)
        with torchotel.step():
            look.tracer.start_span("in step").end()
            model(torch.ones(2, 4)).sum().backward()
    assert look.spans == {}


def test_a_root_has_the_flag_of_a_random_id(server: Receiver) -> None:
    """As those of the SDK: https://www.w3.org/TR/trace-context-2/#random-trace-id-flag, on its links, too."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchotel.instrument(endpoint=server.url.removesuffix("/v1/traces"), metrics_exporter="none"):
        model(torch.ones(2, 4)).sum().backward()
        given = get_current_span().get_span_context()
        optimizer.step()
    assert given.trace_flags == 3
    assert {span.flags for span in server.spans} == {0x103}
    assert {link.flags for span in server.spans for link in span.links} == {0x103}


@pytest.mark.parametrize("limit", ["128", "1"], ids=["whole", "limited"])
def test_a_step_that_is_kept_late_has_the_flags_that_it_gave_out(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler had left it out when the program asked, so the program's own spans in it are missing."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", limit)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with receiver() as server:
        endpoint = server.url.removesuffix("/v1/traces")
        with torchotel.instrument(endpoint=endpoint, metrics_exporter="none", record=tmp_path / "run"):
            model(torch.ones(2, 4)).sum().backward()
            given = get_current_span().get_span_context()
            own = TracerProvider(shutdown_on_exit=False).get_tracer("user").start_span("in step")
            optimizer.step()
            torchotel.log(loss=math.inf)
        spans = server.spans
    assert spans[0].name == "torch.step"
    assert spans[0].span_id == given.span_id.to_bytes(8)
    assert (given.trace_flags, own.is_recording()) == (2, False)  # a random id, and not sampled
    assert {span.flags for span in spans} == {0x102}
    assert '"flags":258' in (tmp_path / "run" / "trace-00001.jsonl").read_text()


def _unit(duration_ns: int, **more: Any) -> StepRecord:
    return StepRecord("step", 0, 0, duration_ns, 0, 0, detailed=False, **more)


def test_slow_is_half_again_over_the_recent_95th_percentile() -> None:
    """Known after twenty steps; a level that lasts is soon no longer slow."""
    keeper = TailSampler()
    assert [keeper.reason(_unit(100 * n), ()) for n in range(1, 20)] == [None] * 19
    keeper = TailSampler()
    assert {keeper.reason(_unit(1000 + n), ()) for n in range(100)} == {None}
    assert keeper.reason(_unit(1500), ()) is None
    assert keeper.reason(_unit(2000), ()) == "slow"
    assert keeper.reason(_unit(2000, error=Error("E", "")), ("loss",)) == "error"
    assert keeper.reason(_unit(900), ("loss",)) == "nan"
    assert "slow" not in [keeper.reason(_unit(2000), ()) for _ in range(200)][10:]
