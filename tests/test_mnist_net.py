"""The net of PyTorch's basic MNIST example, as a receiver sees it."""

import torch
from support import Net, recorded
from torch.nn import functional


def test_spans_of_a_step_forward_and_backward() -> None:
    """Forward spans come in the order of the calls, backward spans in reverse, each inside its net."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with recorded() as run:
        loss = functional.nll_loss(net(torch.randn(4, 1, 28, 28)), torch.tensor([0, 1, 2, 3]))
        loss.backward()
        optimizer.step()
    (step,) = run.steps
    layers = ["conv1", "conv2", "dropout1", "fc1", "dropout2", "fc2"]
    assert step.tree() == (
        "torch.step",
        [
            ("torch.forward", [("forward Net", [f"forward {layer}" for layer in layers])]),
            ("torch.backward", [("backward Net", [f"backward {layer}" for layer in reversed(layers)])]),
            "torch.optimizer.step",
        ],
    )
