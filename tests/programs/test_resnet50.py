"""torchvision's ResNet-50 on one image of 224x224 pixels: its shapes, its in-place ReLUs, its numbers."""

from typing import NamedTuple

import pytest
import torch
from support.recorded_training import Seen, recorded
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

models = pytest.importorskip("torchvision.models")


class Outcome(NamedTuple):
    """What a step computed, and what a receiver saw of it."""

    plain: dict[str, Tensor]
    watched: dict[str, Tensor]
    model: nn.Module
    step: Seen


def train_step(model: nn.Module, image: Tensor) -> dict[str, Tensor]:
    """Give the loss, every gradient and every buffer."""
    model.zero_grad()
    loss = cross_entropy(model(image), torch.tensor([7]))
    loss.backward()
    gradients = {f"gradient {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    buffers = {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return {"loss": loss.detach(), **gradients, **buffers}


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    torch.manual_seed(0)
    model = models.resnet50(weights=None)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    image = torch.randn(1, 3, 224, 224)
    plain = train_step(model, image)
    model.load_state_dict(weights)
    with recorded() as run:
        watched = train_step(model, image)
    (step,) = run.steps
    return Outcome(plain, watched, model, step)


@pytest.mark.parametrize(
    ("layer", "input_shape", "output_shape"),
    [("layer3", "1x512x28x28", "1x1024x14x14"), ("layer4", "1x1024x14x14", "1x2048x7x7")],
)
def test_shapes_of_the_last_layers(outcome: Outcome, layer: str, input_shape: str, output_shape: str) -> None:
    """Gradients have the shapes of what they are the gradients of."""
    forward = outcome.step.find(f"forward {layer}").attributes
    assert forward["torch.input.shapes"] == [input_shape]
    assert forward["torch.output.shapes"] == [output_shape]
    backward = outcome.step.find(f"backward {layer}").attributes
    assert backward["torch.grad_output.shapes"] == [output_shape]
    assert backward["torch.grad_input.shapes"] == [input_shape]


def test_every_number_is_what_it_was_before(outcome: Outcome) -> None:
    """Loss, 161 gradients and all running statistics equal those of the uninstrumented step bit for bit."""
    assert outcome.plain.keys() == outcome.watched.keys()
    assert sum(name.startswith("gradient") for name in outcome.plain) == 161
    assert [name for name, value in outcome.plain.items() if not torch.equal(value, outcome.watched[name])] == []


def test_every_module_has_its_spans(outcome: Outcome) -> None:
    """Each module that is called has a span forward and one backward, the in-place ReLUs three in a block."""
    called = [path for path, _ in outcome.model.named_modules() if path] + ["ResNet"]
    for direction in ("forward", "backward"):
        spans = [span for span in outcome.step.walk() if span.attributes.get("torch.direction") == direction]
        assert {span.attributes["torch.module.path"] for span in spans} == set(called)
        relus = [span for span in spans if span.name == f"{direction} layer4.2.relu"]
        assert sorted(span.attributes["torch.call.index"] for span in relus) == [0, 1, 2]
        assert [span.name for span in spans if "torch.estimated" in span.attributes] == []


def test_spans_stand_inside_the_modules_that_called_them(outcome: Outcome) -> None:
    """Both trees are the tree of the modules."""
    for direction in ("forward", "backward"):
        for span in outcome.step.walk():
            if span.attributes.get("torch.direction") != direction or span.parent is None:
                continue
            holder = span.attributes["torch.module.path"].rpartition(".")[0] or "ResNet"
            outermost = span.attributes["torch.module.path"] == "ResNet"
            assert span.parent.name == (f"torch.{direction}" if outermost else f"{direction} {holder}")
