"""Programs whose records have one of everything, for what must hold of all of them."""

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from support.recorded_training import Net


def train(net: nn.Module, *inputs: Tensor) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for given in inputs:
        optimizer.zero_grad()
        functional.nll_loss(net(given), torch.zeros(len(given), dtype=torch.long)).backward()
        optimizer.step()


def mnist() -> None:
    """The net of PyTorch's basic example."""
    train(Net(), *[torch.randn(4, 1, 28, 28) for _ in range(3)])


def error_in_forward() -> None:
    """A layer that raises, with a message that is not plain."""

    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 2:
                raise ValueError("zu gro\xdf \U0001f525\n")
            return x

    net = nn.Sequential(nn.Linear(4, 4), Picky(), nn.LogSoftmax(1))
    train(net, torch.randn(2, 4))
    with pytest.raises(ValueError, match="zu"):
        train(net, torch.randn(3, 4))
    train(net, torch.randn(2, 4))


def checkpointed() -> None:
    """A block that runs again in the backward."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return functional.log_softmax(output, 1)

    train(Block(), torch.randn(2, 4, requires_grad=True), torch.randn(2, 4))


def registrations() -> None:
    """Layers, parameters and buffers that come while a step runs."""
    net = nn.Sequential(nn.Linear(4, 4), nn.LogSoftmax(1))
    train(net, torch.randn(2, 4))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loss = net(torch.randn(2, 4)).square().mean()
    net.register_buffer("seen", torch.zeros(1))
    net[0].register_parameter("scale", nn.Parameter(torch.ones(1)))
    net.insert(1, nn.Linear(4, 4))
    loss.backward()
    optimizer.step()
    train(net, torch.randn(2, 4))


def evaluations() -> None:
    """Batches without gradients: alone, under a request of this process, and under one of another."""
    net = nn.Linear(4, 4)
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("user")
    elsewhere = SpanContext(2**100 + 1, 2**60 + 1, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    with torch.no_grad():
        net(torch.randn(1, 4))
        with tracer.start_as_current_span("request"):
            for _ in range(15):
                net(torch.randn(1, 4))
        with use_span(NonRecordingSpan(elsewhere)):
            net(torch.randn(1, 4))


def a_span_around() -> None:
    """Steps inside a span of the user's, which they link to."""
    with TracerProvider(shutdown_on_exit=False).get_tracer("user").start_as_current_span("fit"):
        train(nn.Sequential(nn.Linear(4, 4), nn.LogSoftmax(1)), torch.randn(2, 4), torch.randn(2, 4))


def shared() -> None:
    """A layer that is called three times in a step."""
    layer = nn.Linear(4, 4)
    train(nn.Sequential(layer, layer, nn.ReLU(), layer, nn.LogSoftmax(1)), torch.randn(2, 4), torch.randn(2, 4))


def empty_shapes() -> None:
    """A net that takes nothing but a number, and one that gives several tensors."""

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)

        def forward(self, n: int) -> tuple[Tensor, Tensor]:
            x = self.head(torch.ones(n, 4))
            return x, x.exp()

    net = Constant()
    for _ in range(2):
        first, second = net(3)
        (first.sum() + second.sum()).backward()


PROGRAMS = [mnist, error_in_forward, checkpointed, registrations, evaluations, a_span_around, shared, empty_shapes]
