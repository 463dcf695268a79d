"""What only a GPU can show: captured graphs, compiled kernels, and losses whose overflow the device finds."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from torchotel.testing import capture

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

Program = Callable[[nn.Module, Tensor], list[Tensor]]


def graph_of_a_step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Capture a whole training step, and replay it."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    warming = torch.cuda.Stream()
    warming.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warming):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(warming)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    losses = []
    for _ in range(3):
        graph.replay()
        losses.append(loss.clone())
    return losses


def graphed_callable(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Train a model whose forward and backward are graphs."""
    torch.cuda.make_graphed_callables(model, (x,))  # the model's own forward from now on
    return scaled(model, x, enabled=False)


def compiled(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Train a model that Inductor has compiled."""
    torch.compiler.reset()
    model.compile()
    return scaled(model, x, enabled=False)


def scaled(model: nn.Module, x: Tensor, *, enabled: bool = True) -> list[Tensor]:
    """Train in half precision, by a fused optimizer that is told on the device to skip the second step."""
    optimizer, scaler = torch.optim.Adam(model.parameters(), 0.1, fused=True), torch.amp.GradScaler(enabled=enabled)
    losses = []
    for number in range(4):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=enabled):
            loss: Tensor = model(x).square().mean()
        scaler.scale(loss * (float("inf") if enabled and number == 1 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("program", [graph_of_a_step, graphed_callable, compiled, scaled])
@pytest.mark.parametrize("detail", ["all", "off"])
def test_programs_of_a_device(program: Program, detail: str) -> None:
    """Losses and parameters are bit for bit what they are without torchotel, and no error of ours is caught."""

    def run() -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
        losses = program(model, torch.randn(32, 64, device="cuda"))
        return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]

    expected = run()
    with capture(detail=detail, gradient_norms=True) as captured:
        numbers = run()
    assert all(torch.equal(one, other) for one, other in zip(numbers, expected, strict=True))
    assert len(captured.steps) >= 3
    assert captured.handle.stats()["internal_errors"] == 0
