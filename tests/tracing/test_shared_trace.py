"""The trace that all ranks share: ids, names, and each rank's part of the spans."""

import pytest

from torchotel._records import Phase, StepRecord
from torchotel._utils.distributed import Identity
from torchotel._utils.gil import GilYielder
from torchotel.sampling.detail import hash_of
from torchotel.tracing.call_tree import CallTreeBuilder
from torchotel.tracing.ids import IdGenerator
from torchotel.tracing.shared_trace import RANKS_WITH_MODULES, STEP_SPANS, SharedTraces
from torchotel.tracing.span import Trace
from torchotel.tracing.span_templates import Templates
from torchotel.tracing.trace_builder import TraceBuilder

MAX_SPANS = 2000
STEPS = range(400)


def of_rank(rank: int, ranks: int, run: str = "run", launch: str = "launch", generation: int = 0) -> SharedTraces:
    identity = Identity(rank, rank, ranks, run, generation, launch)
    return SharedTraces(lambda: identity)


def test_ids() -> None:
    """Each part of the launch and of the alignment makes another trace; the rank does not, nor its own run id."""
    first = of_rank(0, 4).trace_id((7, 0))
    assert first == of_rank(3, 4).trace_id((7, 0)) == of_rank(0, 4, run="another").trace_id((7, 0))
    others = [
        of_rank(0, 4).trace_id((8, 0)),
        of_rank(0, 4).trace_id((7, 1)),
        of_rank(0, 4, launch="another").trace_id((7, 0)),
        of_rank(0, 4, generation=1).trace_id((7, 0)),
    ]
    assert len({first, *others}) == 5
    assert of_rank(0, 1).trace_id(None) is None
    assert of_rank(0, 4, launch="").trace_id((7, 0)) is None
    assert of_rank(0, 4, launch="").root_template("step", (7, 0)).name == "torch.step"


@pytest.mark.parametrize("ranks", [2, 4, 8, 64, 300, 1000, 1999])
def test_the_spans_of_all_ranks_fit(ranks: int) -> None:
    shares = [[of_rank(rank, ranks).max_spans(MAX_SPANS, (step, 0)) or 0 for rank in range(ranks)] for step in range(3)]
    assert all(sum(share) <= MAX_SPANS and min(share) >= 1 for share in shares)
    assert all(sum(one > min(share) for one in share) in {0, *range(1, RANKS_WITH_MODULES + 1)} for share in shares)


@pytest.mark.parametrize("ranks", [8, 64])
def test_each_rank_has_its_turn(ranks: int) -> None:
    """Of 8 or 64 ranks, four at a time have the spans of their modules."""
    most = max(of_rank(0, ranks).max_spans(MAX_SPANS, (step, 0)) or 0 for step in STEPS)
    assert most > MAX_SPANS // 10
    assert all(
        any(of_rank(rank, ranks).max_spans(MAX_SPANS, (step, 0)) == most for step in STEPS) for rank in range(ranks)
    )


def test_no_limit() -> None:
    assert of_rank(0, 1000).max_spans(None, (1, 0)) is None
    assert of_rank(0, 1).max_spans(MAX_SPANS, None) == MAX_SPANS


def built(rank: int, ranks: int, step: int) -> Trace:
    """Build the trace of a step with two phases."""
    phases = Phase("forward", 100, 400), Phase("backward", 400, 900)
    record = StepRecord("step", step, 0, 1000, 0, 0, detailed=False, phases=phases, alignment=(step, 0))
    shared, yielder = of_rank(rank, ranks), GilYielder()
    builder = TraceBuilder(Templates(), MAX_SPANS, yielder, shared)
    root = IdGenerator().start("", None, 0, trace_id=shared.trace_id(record.alignment))
    return builder.build(record, CallTreeBuilder(yielder).build(record), root, {})


def test_phases_of_many_ranks() -> None:
    """Of a thousand ranks most have one span, with the times of its phases."""
    trace = next(trace for rank in range(1000) if len((trace := built(rank, 1000, 5)).spans) == 1)
    attributes = trace.root.attributes
    assert attributes is not None
    assert (attributes["torch.step.phase.forward"], attributes["torch.step.phase.backward"]) == (3e-7, 5e-7)
    assert trace.root.template.name.startswith("torch.step rank ")
    few = built(1, STEP_SPANS, 5)
    assert [span.template.name for span in few.spans] == ["torch.step rank 1", "torch.forward", "torch.backward"]
    assert not any(name.startswith("torch.step.phase.") for name in few.root.attributes or {})


def test_the_hash_of_an_alignment_is_spread() -> None:
    """Of the steps of a program, one in n lies below one n-th of all values, whichever number counts."""
    for alignments in ([(step, 0) for step in range(4096)], [(7, step) for step in range(4096)]):
        for every in (2, 16):
            chosen = sum(hash_of(alignment) < (1 << 64) // every for alignment in alignments)
            assert 0.8 < chosen * every / len(alignments) < 1.2
