"""A net returns what went into its layers and what came out; the receiver must have got the same."""

from typing import Any

import torch
from support.recorded_training import recorded
from torch import Tensor, nn


class Reader(nn.Module):
    """Its layers differ in dtype, in the number of tensors and in how they take them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.order = nn.LSTM(8, 6, batch_first=True)
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)
        self.mark = nn.Linear(6, 3, dtype=torch.float64)
        self.narrow = nn.Linear(3, 3, dtype=torch.bfloat16)
        self.loss = nn.MSELoss()

    def forward(self, ids: Tensor, target: Tensor) -> tuple[Tensor, dict[str, tuple[list[Tensor], list[Tensor]]]]:
        """Give the loss, and by layer the inputs and the outputs."""
        vectors = self.words(ids)
        states, (last, cell) = self.order(vectors)
        attended, weights = self.attend(states, key=states, value=vectors[..., :6])
        wide = attended.mean(1).double()
        marks = self.mark(wide)
        short = marks.bfloat16()
        scores = self.narrow(short)
        floats = scores.float()
        loss = self.loss(floats, target)
        return loss, {
            "words": ([ids], [vectors]),
            "order": ([vectors], [states, last, cell]),
            "attend": ([states, states, vectors[..., :6]], [attended, weights]),
            "mark": ([wide], [marks]),
            "narrow": ([short], [scores]),
            "loss": ([floats, target], [loss]),
        }


def shapes(tensors: list[Tensor]) -> list[str]:
    return ["x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors]


def dtypes(tensors: list[Tensor]) -> list[str]:
    return [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]


def wanted(inputs: list[Tensor], outputs: list[Tensor]) -> dict[str, Any]:
    return {
        "torch.input.shapes": shapes(inputs),
        "torch.output.shapes": shapes(outputs),
        "torch.input.dtypes": dtypes(inputs),
        "torch.output.dtypes": dtypes(outputs),
    }


def test_recorded_shapes_and_dtypes_are_those_returned() -> None:
    """Inputs and outputs of each layer are recorded as they were, also when their shapes change from step to step."""
    reader = Reader()
    returned = []
    with recorded() as run:
        for batch, length in ((4, 7), (2, 5), (4, 7)):
            loss, passed = reader(torch.randint(20, (batch, length)), torch.randn(batch, 3))
            loss.backward()
            returned.append(passed)
    for step, passed in zip(run.steps, returned, strict=True):
        for layer, (inputs, outputs) in passed.items():
            forward = step.find(f"forward {layer}").attributes
            assert {name: forward[name] for name in wanted([], [])} == wanted(inputs, outputs), layer
            backward = step.find(f"backward {layer}").attributes
            assert backward["torch.grad_output.shapes"] == shapes([t for t in outputs if t.requires_grad])
            assert backward["torch.grad_input.shapes"] == shapes([t for t in inputs if t.requires_grad])


def test_the_root_shows_everything_that_it_returned() -> None:
    """Nested containers are flattened in order: the loss, then every tensor of the dictionary's lists."""
    reader = Reader()
    with recorded() as run:
        ids, target = torch.randint(20, (4, 7)), torch.randn(4, 3)
        loss, passed = reader(ids, target=target)
        loss.backward()
    outputs = [loss] + [tensor for inputs, results in passed.values() for tensor in (*inputs, *results)]
    root = run.steps[0].find("forward Reader").attributes
    assert {name: root[name] for name in wanted([], [])} == wanted([ids, target], outputs)
