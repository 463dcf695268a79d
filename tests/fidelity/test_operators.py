"""Which operators run, seen below autograd: the same ones in the same order, and none of ours."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fidelity import forward_subjects, layer_subjects
from fidelity.layer_subjects import SIDE, Make, chain, subject
from fidelity.subjects import Subject
from fidelity.training import train
from torchotel.testing import capture

pytestmark = pytest.mark.filterwarnings("ignore")  # the models' own

SUBJECTS = [*layer_subjects.subjects(), *forward_subjects.subjects()]
FUSED = "aten._transformer_encoder_layer_fwd.default"
layer = partial(nn.TransformerEncoderLayer, SIDE, 2, 16, batch_first=True)


class Operators(TorchDispatchMode):
    """Notes every operator that is run in its block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(str(operator))
        return operator(*args, **(kwargs or {}))


def of_training(subject: Subject) -> list[str]:
    operators = Operators()
    with operators:
        train(subject)
    return operators.seen


def of_evaluation(subject: Subject) -> list[str]:
    model, args, kwargs = subject.make()
    model.eval()
    operators = Operators()
    with torch.no_grad(), operators:
        model(*args, **kwargs)
    return operators.seen


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_training_runs_the_same_operators(subject: Subject) -> None:
    """Forward, backward and the optimizer run operator for operator what they run alone."""
    expected = of_training(subject)
    with capture(gradient_norms=False):
        seen = of_training(subject)
    assert seen == expected
    assert len(seen) > 4


@pytest.mark.parametrize("make", [lambda: nn.TransformerEncoder(layer(), 2), chain(layer, layer)])
def test_inference_takes_the_fused_path_of_the_transformer(make: Make) -> None:
    """An encoder that is evaluated runs one kernel a layer, which hooks on its modules would keep it from."""
    encoder = subject("evaluated", "encoder", make, 2, 3, SIDE)
    expected = of_evaluation(encoder)
    with capture() as captured:
        seen = of_evaluation(encoder)
    assert seen == expected
    assert seen.count(FUSED) == 2
    assert len(captured.evaluations) == 1
