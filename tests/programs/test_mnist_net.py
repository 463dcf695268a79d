"""The net of PyTorch's basic MNIST example, as a receiver sees it."""

import threading

import pytest
import torch
from support.recorded_training import Net, Seen, recorded
from torch import Tensor, nn
from torch.nn import functional

LAYERS = ["conv1", "conv2", "dropout1", "fc1", "dropout2", "fc2"]
"""In the order of their calls."""
SHAPES = {
    "Net": ("4x1x28x28", "4x10"),
    "conv1": ("4x1x28x28", "4x32x26x26"),
    "conv2": ("4x32x26x26", "4x64x24x24"),
    "dropout1": ("4x64x12x12", "4x64x12x12"),
    "fc1": ("4x9216", "4x128"),
    "dropout2": ("4x128", "4x128"),
    "fc2": ("4x128", "4x10"),
}
"""Input and output of each module for four images."""


def train_step(net: Net, optimizer: torch.optim.Optimizer, images: Tensor) -> None:
    optimizer.zero_grad()
    functional.nll_loss(net(images), torch.tensor([0, 1, 2, 3])).backward()
    optimizer.step()


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def steps(net: Net) -> list[Seen]:
    """Three steps, as they arrived."""
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with recorded() as run:
        for _ in range(3):
            train_step(net, optimizer, torch.randn(4, 1, 28, 28))
    return run.steps


def test_spans_of_a_step_forward_and_backward(steps: list[Seen]) -> None:
    """Forward spans come in the order of the calls, backward spans in reverse, each inside its net."""
    for step in steps:
        assert step.tree() == (
            "torch.step",
            [
                ("torch.forward", [("forward Net", [f"forward {layer}" for layer in LAYERS])]),
                ("torch.backward", [("backward Net", [f"backward {layer}" for layer in reversed(LAYERS)])]),
                "torch.optimizer.step",
            ],
        )


def test_every_span_says_which_step_it_is_of(steps: list[Seen]) -> None:
    """Steps count from 0, each is a trace of its own, and all of its spans bear its number."""
    assert [{span.attributes["torch.step.number"] for span in step.walk()} for step in steps] == [{0}, {1}, {2}]
    assert len({step.span.trace_id for step in steps}) == 3


def test_forward_spans_say_what_was_called(steps: list[Seen], net: Net) -> None:
    """A forward span names its module and tells shapes, dtypes, device, parameters and modes, and nothing else."""
    modules: dict[str, nn.Module] = {"Net": net, **dict(net.named_children())}
    for path, (input_shape, output_shape) in SHAPES.items():
        assert steps[1].find(f"forward {path}").attributes == {
            "torch.module.path": path,
            "torch.module.type": type(modules[path]).__name__,
            "torch.model": "Net",
            "torch.direction": "forward",
            "torch.device": "cpu",
            "torch.input.shapes": [input_shape],
            "torch.output.shapes": [output_shape],
            "torch.input.dtypes": ["float32"],
            "torch.output.dtypes": ["float32"],
            "torch.module.parameters": sum(p.numel() for p in modules[path].parameters(recurse=False)),
            "torch.training": True,
            "torch.grad_enabled": True,
            "torch.step.number": 1,
        }


def test_backward_spans_say_whose_gradients(steps: list[Seen], net: Net) -> None:
    """A backward span tells the shapes of gradients out and in; images need none."""
    modules: dict[str, nn.Module] = {"Net": net, **dict(net.named_children())}
    for path, (input_shape, output_shape) in SHAPES.items():
        assert steps[1].find(f"backward {path}").attributes == {
            "torch.module.path": path,
            "torch.module.type": type(modules[path]).__name__,
            "torch.model": "Net",
            "torch.direction": "backward",
            "torch.device": "cpu",
            "torch.grad_output.shapes": [output_shape],
            "torch.grad_input.shapes": [] if path in {"Net", "conv1"} else [input_shape],
            "torch.step.number": 1,
        }


def test_step_and_phases_say_what_they_are(steps: list[Seen]) -> None:
    """The optimizer has its class; a step its thread, the reason of its detail, its learning rate and its norm."""
    step = steps[0]
    assert step.find("torch.optimizer.step").attributes == {"torch.optimizer.type": "SGD", "torch.step.number": 0}
    assert step.attributes == {
        "torch.kept.reason": "sampled",
        "torch.step.number": 0,
        "thread.id": threading.get_ident(),
        "torch.learning_rate": 0.01,
        "torch.gradient.norm": pytest.approx(step.attributes["torch.gradient.norm"]),
    }
    assert step.attributes["torch.gradient.norm"] > 0


def test_shapes_can_be_left_out(net: Net) -> None:
    """With `shapes=False` no span tells shapes or dtypes, and all else stays."""
    with recorded(shapes=False) as run:
        train_step(net, torch.optim.SGD(net.parameters(), 0.01), torch.randn(4, 1, 28, 28))
    spans = list(run.steps[0].walk())
    assert len(spans) == 18
    assert not [name for span in spans for name in span.attributes if "shapes" in name or "dtypes" in name]
    assert run.steps[0].find("forward conv2").attributes["torch.module.parameters"] == 18496
