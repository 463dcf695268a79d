"""Pipelines: the stage and the microbatch of each call, and the gradient norms of a rank's stages."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fidelity.norms import true_norm
from support.needs import needs_pipelines
from support.ranks import call_on_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from torchotel import _semconv as names
from torchotel._records import StepRecord
from torchotel.testing import Captured, capture

pytestmark = [pytest.mark.program, needs_pipelines]

RANKS, MICROBATCHES = 2, 4
BATCH = torch.arange(float(MICROBATCHES)).repeat_interleave(2).unsqueeze(1).expand(-1, 3).contiguous()
"""Each number is that of its microbatch."""


class Pipeline(NamedTuple):
    schedule: Callable[..., Any]
    stages_of_rank: int


PIPELINES = [
    Pipeline(ScheduleGPipe, 1),
    Pipeline(Schedule1F1B, 1),
    Pipeline(ScheduleInterleaved1F1B, 2),
    Pipeline(ScheduleInterleavedZeroBubble, 2),
]


class Scale(nn.Module):
    """A layer that leaves its input as it is, and notes which microbatches it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.microbatches = nn.Parameter(torch.ones(3)), list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.microbatches.append(int(x[0, 0]))
        return x * self.weight


def _loss(output: Tensor, _: object = None) -> Tensor:
    return output.square().mean()


def _stage(layer: nn.Module, number: int, count: int) -> PipelineStage:
    given = BATCH[:2].clone().requires_grad_(number > 0)  # with examples PyTorch does not call the layer for its shapes
    return PipelineStage(
        nn.Sequential(layer),
        number,
        count,
        torch.device("cpu"),
        input_args=given,
        output_args=BATCH[:2].clone().requires_grad_(),
    )


def _step(pipeline: Pipeline, rank: int) -> dict[str, Any]:
    """Run one step; return what the layers noted, what the spans tell, and the norms, by stage."""
    numbers = [rank + RANKS * index for index in range(pipeline.stages_of_rank)]
    count = RANKS * len(numbers)
    layers = [Scale() for _ in numbers]
    made = [_stage(layer, number, count) for layer, number in zip(layers, numbers, strict=True)]
    schedule = pipeline.schedule(made if len(made) > 1 else made[0], MICROBATCHES, loss_fn=_loss)
    optimizer = torch.optim.SGD([layer.weight for layer in layers], 0.1)
    with capture(gradient_norms=True) as captured:
        schedule.step(*([BATCH] if 0 in numbers else []), **({"target": BATCH} if count - 1 in numbers else {}))
        optimizer.step()
    (norms,) = [one.gradients for one in captured.records if isinstance(one, StepRecord)]
    assert norms is not None
    assert norms.sharded
    (step,) = captured.steps
    assert step.attributes[names.GRADIENT_SCOPE] == "shard"
    assert 0 <= float(str(step.attributes[names.PIPELINE_BUBBLE_RATIO])) < 1
    return {
        "noted": {number: layer.microbatches for number, layer in zip(numbers, layers, strict=True)},
        **{direction: _microbatches(captured, direction) for direction in ("forward", "backward")},
        "norms": [norms.total, *(norm for _, norm in norms.modules)],
    }


def _microbatches(captured: Captured, direction: str) -> dict[int, list[int]]:
    """Return the microbatches of the layers' spans in order, by stage."""
    found: dict[int, list[int]] = {}
    spans = [span for root in captured.roots for span in root.walk() if span.name == f"{direction} 0"]
    for span in sorted(spans, key=lambda span: span.start_ns):
        stage, microbatch = (span.attributes[name] for name in (names.PIPELINE_STAGE, names.PIPELINE_MICROBATCH))
        found.setdefault(int(str(stage)), []).append(int(str(microbatch)))
    return found


def _write_steps(rank: int, folder: Path) -> None:
    (folder / f"{rank}.json").write_text(json.dumps([_step(pipeline, rank) for pipeline in PIPELINES]))


def _true_norms(count: int) -> list[float]:
    whole = nn.Sequential(*[Scale() for _ in range(count)])
    for part in BATCH.chunk(MICROBATCHES):
        (_loss(whole(part)) / MICROBATCHES).backward()
    return [true_norm([parameter.grad]) for parameter in whole.parameters()]


def test_calls_have_their_stage_and_microbatch_and_norms_add_up(tmp_path: Path) -> None:
    """Each span names the microbatch that its layer got; norms are those after the schedule has scaled gradients."""
    call_on_ranks(_write_steps, RANKS, tmp_path, tmp_path)
    of_ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    for pipeline, *ranks in zip(PIPELINES, *of_ranks, strict=True):
        true = _true_norms(RANKS * pipeline.stages_of_rank)
        for rank, found in enumerate(ranks):
            assert found["forward"] == found["noted"], pipeline
            # A zero-bubble schedule splits a backward: first the gradients of inputs, later those of weights.
            assert {stage: {*seen} for stage, seen in found["backward"].items()} == {
                stage: {*seen} for stage, seen in found["noted"].items()
            }, pipeline
            assert found["norms"][1:] == pytest.approx(true[rank::RANKS], rel=1e-5), pipeline
        assert math.hypot(*(found["norms"][0] for found in ranks)) == pytest.approx(math.hypot(*true), rel=1e-5)
