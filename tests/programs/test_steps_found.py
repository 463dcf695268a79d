"""Trainings that end, change or mix in ways of their own: the steps that their authors would count."""

import asyncio
import logging

import pytest
import torch
from opentelemetry.trace import get_current_span
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchotel.testing import capture

ROWS = torch.ones(2, 4)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(ROWS).sum().backward()
        optimizer.step()


def _step_by_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = model(ROWS).sum()
        loss.backward()
        return float(loss)

    optimizer.step(closure)


@pytest.mark.parametrize("forwards", [0, 1, 2])
def test_gradients_computed_after_the_last_step_are_no_step(forwards: int) -> None:
    """Each forward among them is an evaluation."""
    model = nn.Linear(4, 1)
    with capture() as captured:
        _train(model, _sgd(model), 3)
        for _ in range(forwards):
            torch.func.jacrev(lambda rows: model(rows).sum())(ROWS)
        if not forwards:
            torch.func.jacrev(lambda rows: (rows**2).sum())(ROWS)
    assert (len(captured.steps), len(captured.evaluations)) == (3, forwards)


def test_a_step_that_ends_before_its_optimizer_is_a_step() -> None:
    """Its backward has filled the parameters' gradients: the program was stopped."""
    model = nn.Linear(4, 1)
    with capture() as captured:
        _train(model, _sgd(model), 3)
        model(ROWS).sum().backward()
    assert len(captured.steps) == 4


def test_a_second_training_by_closures_begins_with_a_step_of_its_own() -> None:
    """Its first step has another optimizer than the last of the first training."""
    model = nn.Linear(4, 1)
    with capture() as captured:
        for optimizer in (_sgd(model), torch.optim.Adam(model.parameters())):
            for _ in range(3):
                _step_by_closure(model, optimizer)
    assert len(captured.steps) == 6


def test_two_networks_that_step_by_closures_in_turn_share_each_step() -> None:
    """As those of a GAN."""
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [_sgd(model) for model in models]
    with capture() as captured:
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                _step_by_closure(model, optimizer)
    assert len(captured.steps) == 3


def test_a_detailed_step_of_networks_that_step_unequally_has_all_layers_and_gradients() -> None:
    """A critic that trains on each batch, a generator on each second one: both belong to the batch's step."""
    generator, critic = nn.Linear(2, 4), nn.Linear(4, 1)
    optimizers = [_sgd(critic), _sgd(generator)]
    norms = []
    with capture(detail=3, gradient_norms="auto") as captured:
        for batch, (rows,) in enumerate(DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=2)):
            squares = 0.0
            for network, optimizer in list(zip((critic, generator), optimizers, strict=True))[: 2 - batch % 2]:
                critic.zero_grad()
                critic(rows if network is critic else generator(torch.randn(2, 2))).sum().backward()
                squares += sum(float(p.grad.square().sum()) for p in network.parameters() if p.grad is not None)
                optimizer.step()
            norms.append(squares**0.5)
    steps = captured.steps[::3]
    calls = [len([span for span in step.walk() if span.name.startswith("forward ")]) for step in steps]
    assert (len(captured.steps), calls) == (12, [3, 1, 3, 1])
    found = [step.attributes["torch.gradient.norm"] for step in steps]
    assert found == pytest.approx(norms[::3], rel=1e-5)


def test_an_evaluation_amid_a_step_takes_no_ids_of_the_step() -> None:
    """Spans of the program that began in the step stay in its trace."""
    model = nn.Linear(4, 1)
    optimizer = _sgd(model)
    with capture() as captured:
        _train(model, optimizer, 1)
        model(ROWS).sum().backward()
        current = get_current_span().get_span_context()
        for (rows,) in DataLoader(TensorDataset(ROWS), batch_size=2):
            model.eval()(rows)
        _train(model.train(), optimizer, 1)
    assert len(captured.evaluations) == 1
    assert captured.steps[-1].trace_id == current.trace_id


async def _train_in_turns(model: nn.Module) -> None:
    optimizer = _sgd(model)
    for _ in range(2):
        loss = model(ROWS).sum()
        await asyncio.sleep(0)
        loss.backward()
        await asyncio.sleep(0)
        optimizer.step()
        await asyncio.sleep(0)


def test_two_tasks_that_train_on_one_thread_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """By no event can their steps be told from those of one training of two networks."""

    async def train() -> None:
        await asyncio.gather(_train_in_turns(nn.Linear(4, 1)), _train_in_turns(nn.Linear(4, 1)))

    with caplog.at_level(logging.WARNING), capture():
        asyncio.run(train())
    assert sum("two tasks of asyncio" in record.message for record in caplog.records) == 1


def test_two_tasks_that_train_in_threads_have_steps_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    """What the warning says to do."""

    async def train() -> None:
        models = [nn.Linear(4, 1), nn.Linear(4, 1)]
        await asyncio.gather(*(asyncio.to_thread(_train, model, _sgd(model), 2) for model in models))

    with caplog.at_level(logging.WARNING), capture() as captured:
        asyncio.run(train())
        asyncio.run(_train_in_turns(nn.Linear(4, 1)))
        asyncio.run(_train_in_turns(nn.Linear(4, 1)))
    assert len(captured.steps) == 8
    assert not [record for record in caplog.records if "asyncio" in record.message]
