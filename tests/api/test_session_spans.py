"""The spans of a session as a receiver sees them: which there are, how they stand, and how many."""

import random
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.recorded_training import recorded, train
from torch import nn

import torchotel
from torchotel.sampling.detail import MAX_INTERVAL, WHILE_MEASURING, is_chosen
from torchotel.tracing.span import Trace
from torchotel.tracing.trace_builder import TraceBuilder


def test_spans_as_a_receiver_sees_them() -> None:
    """Ids are unique, parents right, children inside, nothing lost; steps link to the one `torch.run`."""
    with recorded() as run:
        train(20)
    (first,) = [root for root in run.roots if root.name == "torch.run"]
    assert len(run.steps) == 20
    assert len({step.span.trace_id for step in run.steps}) == 20
    for step in run.steps:
        assert step.span.links == []  # a root with links has no critical path in Jaeger's page
        assert [link.span_id for link in step.children[0].span.links] == [first.span.span_id]
        assert {span.attributes["torch.step.number"] for span in step.walk()} == {step.attributes["torch.step.number"]}
    assert first.attributes["torch.model"] == "Sequential"
    assert first.attributes["torchotel.config.detail"] == "all"
    assert not any("header" in name for name in first.attributes)


def test_each_session_has_a_run_span_of_its_own() -> None:
    """Sessions with the same run id export different span ids."""
    found = []
    for _ in range(2):
        with recorded(run_id="job-7") as run:
            train(1)
        found += [root.span.span_id for root in run.roots if root.name == "torch.run"]
    assert len(set(found)) == len(found) == 2


def test_a_step_that_is_kept_late_links_to_no_run_that_is_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    with recorded() as run, pytest.raises(RuntimeError), torchotel.step():
        raise RuntimeError("kept")
    assert [root.name for root in run.roots] == ["torch.step"]
    assert not any(span.span.links for root in run.roots for span in root.walk())


def test_siblings_stand_a_microsecond_apart() -> None:
    """Jaeger counts in microseconds, and touching siblings vanish from its critical path."""
    with recorded() as run:
        train(5)
    for step in run.steps:
        for span in step.walk():
            for one, following in pairwise(span.children):
                assert one.end_ns // 1000 < following.start_ns // 1000


def test_folding_at_max_spans() -> None:
    """Above `max_spans` the deepest modules fold into their parents, which say how many and how long."""
    blocks = nn.Sequential(*[nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)]) for _ in range(4)])
    with recorded(max_spans=15) as run:
        blocks(torch.randn(2, 4)).sum().backward()
    (step,) = run.steps
    assert len(list(step.walk())) == 13  # step, 2 phases, 2 roots, 8 blocks
    block = step.find("forward 2")
    assert block.children == []
    assert block.attributes["torch.folded.calls"] == 5
    assert 0 < block.attributes["torch.folded.time"] <= (block.end_ns - block.start_ns) / 1e9
    assert step.find("backward 2").attributes["torch.folded.calls"] == 5


def test_a_thousand_forwards_stay_within_max_spans() -> None:
    """Even outermost calls and phases fold where there are too many."""
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with recorded(max_spans=50) as run:
        for _ in range(60):
            net(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    (step,) = run.steps
    assert len(list(step.walk())) <= 50
    assert step.attributes["torch.folded.calls"] > 0


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"include": "0*"}, {"forward 0", "forward 0.0", "backward 0", "backward 0.0"}),
        ({"exclude": ["*.0", "1"]}, {"forward Sequential", "forward 0", "backward Sequential", "backward 0"}),
        ({"max_depth": 0}, {"forward Sequential", "backward Sequential"}),
    ],
)
def test_which_modules_get_spans(settings: dict[str, Any], names: set[str]) -> None:
    """Modules that are left out make no span; what they hold stands under the next one that is shown."""
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    with recorded(**settings) as run:
        net(torch.randn(2, 4)).sum().backward()
    (step,) = run.steps
    assert {span.name for span in step.walk() if span.name.startswith(("forward", "backward"))} == names


def test_without_shapes() -> None:
    """`shapes=False` leaves shapes and dtypes out, and nothing else."""
    with recorded(shapes=False) as run:
        train(1)
    attributes = run.steps[0].find("forward 0").attributes
    assert not any("shapes" in name or "dtypes" in name for name in attributes)
    assert attributes["torch.device"] == "cpu"


def test_auto_stays_within_its_budget() -> None:
    """ "auto" is the first ten steps, one in eight until it is known what that costs, then no more than is allowed."""
    # Of steps as short as these, detail takes far more than this.
    with recorded("auto", overhead_budget=1e-6) as run:
        for _ in range(200):
            train(1)
            run.handle.flush()  # the worker has measured the step before the next begins
    detailed = [int(str(step.attributes["torch.step.number"])) for step in run.steps if step.find_all("forward 0")]
    assert detailed[:10] == list(range(10))
    measured = [number for number in detailed[10:] if not is_chosen(number, MAX_INTERVAL)]
    assert [number // WHILE_MEASURING for number in measured] == list(range(measured[0] // 8, measured[0] // 8 + 5))
    reasons = [step.attributes.get("torch.kept.reason") for step in run.steps]
    assert reasons[:10] == ["first"] * 10
    assert {reasons[number] for number in detailed[10:]} <= {"sampled", "slow"}
    assert {reasons[number] for number in range(10, 200) if number not in detailed} <= {None, "slow"}
    stats = run.handle.stats()
    assert (stats["steps"], stats["steps_detailed"]) == (200, len(detailed))
    assert stats["overhead_ratio"] is not None


def test_detail_costs_what_the_worker_takes_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fourth step has eleven spans, the others five; if each takes a second, that is all the time there is."""
    build, now_ns = TraceBuilder.build, 0

    def slow(builder: TraceBuilder, *args: Any) -> Trace:
        nonlocal now_ns
        trace = build(builder, *args)
        now_ns += 10**9 * len(trace.spans)
        return trace

    monkeypatch.setattr(TraceBuilder, "build", slow)
    monkeypatch.setattr(time, "thread_time_ns", lambda: now_ns)
    with recorded(4, worker="thread") as run:
        train(28)
    ratio = run.handle.stats()["overhead_ratio"]
    assert ratio == pytest.approx((11 / 5 - 1) * 6 / 27, rel=0.1), "the first step, which warms up, does not count"


def test_ids_and_the_programs_random_numbers() -> None:
    """Ids are unique where the program seeds again at each step, and its random numbers are what they were."""
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    drawn = []
    with recorded("off") as run:
        for _ in range(3):
            random.seed(1)
            net(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            assert run.handle.flush()
            drawn.append(random.random())
    random.seed(1)
    assert drawn == [random.random()] * 3
    assert len({step.span.trace_id for step in run.steps}) == 3
