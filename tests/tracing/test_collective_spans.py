"""Test the share of the collectives' time in which layers run."""

import pytest

from torchotel import _semconv as names
from torchotel._records import Collective, StepRecord
from torchotel.tracing.collective_spans import CollectiveSpans
from torchotel.tracing.layout import Node
from torchotel.tracing.span import SpanTemplate


def _collective(start_ns: int, done_ns: int) -> Collective:
    return Collective("all_reduce", "default_pg", 2, 8, 1, start_ns, start_ns, done_ns)


def _step(*collectives: Collective) -> Node:
    """Return the root of a step with a backward from 100 to 900, and layers from 100 to 300 and from 400 to 600."""
    times = [(-1, 0, 1000), (0, 100, 900), (1, 100, 600), (2, 100, 300), (2, 400, 600)]
    nodes = [Node(SpanTemplate("", {}), *time) for time in times]
    CollectiveSpans().add(nodes, StepRecord("step", 0, 0, 1000, 0, 0, detailed=True, collectives=[*collectives]))
    assert len(nodes) == len(times) + len(collectives)
    return nodes[0]


@pytest.mark.parametrize(
    ("collectives", "ratio"),
    [
        pytest.param([_collective(310, 710)], 200 / 400, id="around a layer"),
        pytest.param([_collective(310, 500)], 100 / 190, id="ends in a layer"),
        pytest.param([_collective(150, 250)], 0, id="called by a layer, which may wait"),
        pytest.param([_collective(650, 850)], 0, id="after the layers"),
        pytest.param([_collective(310, 710), _collective(650, 850)], 200 / 600, id="two"),
        pytest.param([_collective(310, 0)], None, id="with an unknown end"),
    ],
)
def test_the_share_of_the_time_in_which_layers_run(collectives: list[Collective], ratio: float | None) -> None:
    attributes = _step(*collectives).attributes or {}
    assert attributes.get(names.COLLECTIVE_OVERLAP_RATIO) == (None if ratio is None else pytest.approx(ratio))
