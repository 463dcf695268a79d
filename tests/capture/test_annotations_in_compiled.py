"""What a program says of itself inside a compiled function: nothing, and no graph breaks for it."""

from typing import Any

import pytest
import torch
from support.recorded_training import recorded
from torch import Tensor, nn
from torch._dynamo import trace_rules

import torchotel


@pytest.mark.parametrize("speak", ["log", "watch", "step"])
def test_a_full_graph_stays_one(speak: str) -> None:
    """What ran without torchotel runs with it."""
    torch._dynamo.reset()
    model = nn.Linear(4, 1)

    def loss_of(batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).square().mean()
        if speak == "log":
            torchotel.log(loss=loss)
        elif speak == "watch":
            torchotel.watch(loss, "loss")
        else:
            with torchotel.step(epoch=1):
                loss = loss * 2
        return loss

    compiled: Any = torch.compile(loss_of, backend="eager", fullgraph=True)
    expected = loss_of(torch.ones(2, 4))
    with recorded() as run:
        assert torch.equal(compiled(torch.ones(2, 4)), expected)
        compiled(torch.ones(2, 4)).backward()
        torchotel.log(outside=1)
    assert run.steps[-1].attributes["torch.log.outside"] == 1
    torch._dynamo.reset()


def test_dynamo_is_told_of_us_once() -> None:
    """Each telling makes its pattern longer, for the process."""
    with recorded():
        pass
    before = len(trace_rules.SKIP_DIRS)
    with recorded():
        pass
    assert len(trace_rules.SKIP_DIRS) == before
