"""Every row of the steps page's table as a real program, with the module hooks in and with them out."""

from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
import torch
from support.recorded_training import Run, Seen, recorded
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchotel.config.config import Detail

LETTERS = {
    "torch.data": "D",
    "torch.forward": "F",
    "torch.backward": "B",
    "torch.optimizer.step": "O",
}
Batches = Iterable[list[Tensor]]


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def _loader(batches: int = 3, workers: int = 0) -> Batches:
    return DataLoader(TensorDataset(torch.randn(batches * 4, 4)), batch_size=4, num_workers=workers)


def _loss(net: nn.Module, x: Tensor) -> Tensor:
    return torch.as_tensor(net(x)).square().mean()


def _phases(step: Seen) -> str:
    return "".join(LETTERS[child.name] for child in step.children if child.name in LETTERS)


def _plain_loop() -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(2):
        for (x,) in _loader():
            optimizer.zero_grad()
            loss = _loss(net, x)
            loss.backward()
            optimizer.step()
            schedule.step()
            loss.item()


def _loop_with_workers() -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for (x,) in _loader(workers=2):
        _loss(net, x).backward()
        optimizer.step()


def _loop_without_loader() -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        _loss(net, torch.randn(4, 4)).backward()
        optimizer.step()


def _accumulation() -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for number, (x,) in enumerate(_loader(8)):
        _loss(net, x).backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def _gan() -> None:
    generator, critic = _net(), nn.Linear(1, 1)
    optimizers = [torch.optim.Adam(net.parameters()) for net in (critic, generator)]
    for (x,) in _loader(2):
        for optimizer in optimizers:
            critic(generator(x)).mean().backward()
            optimizer.step()


def _lbfgs() -> None:
    net = _net()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2, max_eval=2)
    x = torch.randn(4, 4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = _loss(net, x)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)


def _optimizer_in_backward() -> None:
    net = _net()
    for parameter in net.parameters():
        optimizer = torch.optim.SGD([parameter], 0.1)

        def step(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()

        parameter.register_post_accumulate_grad_hook(step)
    for (x,) in _loader(2):
        _loss(net, x).backward()


def _scaler_that_skips() -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    for number, (x,) in enumerate(_loader()):
        loss = _loss(net, x) * (float("inf") if number == 1 else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def _by_hand() -> None:
    net = _net()
    for (x,) in _loader(70):
        _loss(net, x).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None


def _prefetching() -> None:
    """As Accelerate does: the next batch is fetched before the current one is handed out."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    batches = iter(_loader())
    current = next(batches, None)
    while current is not None:
        following = next(batches, None)
        _loss(net, current[0]).backward()
        optimizer.step()
        current = following


def _inside_the_optimizer() -> None:
    """As Lightning does: forward and backward run inside `optimizer.step(closure)`."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for (x,) in _loader():

        def closure(x: Tensor = x) -> float:
            optimizer.zero_grad()
            loss = _loss(net, x)
            loss.backward()
            return loss.item()

        optimizer.step(closure)


@pytest.mark.parametrize("detail", ["all", "off"])
@pytest.mark.parametrize(
    ("program", "steps"),
    [
        # The first fetch of an epoch stands beside the making of its iterator.
        (_plain_loop, ["DDFBO", "DFBO", "DFBO"] * 2),
        (_loop_with_workers, ["DDFBO", "DFBO", "DFBO"]),
        (_loop_without_loader, ["FBO"] * 3),
        (_accumulation, ["DDFBDFBDFBDFBO", "DFBDFBDFBDFBO"]),
        (_gan, ["DDFBOFBO", "DFBOFBO"]),
        (_lbfgs, ["OFBFB", "OFBFB"]),
        (_optimizer_in_backward, ["DDFBOOOO", "DFBOOOO"]),
        (_scaler_that_skips, ["DDFBO", "DFB", "DFBO"]),
        (_by_hand, ["DDFB"] + ["DFB"] * 69),
        (_prefetching, ["DDDFBO", "DFBO", "FBO"]),
        (_inside_the_optimizer, ["DDOFB", "DOFB", "DOFB"]),
    ],
)
def test_steps_of_a_program(program: Callable[[], None], steps: list[str], detail: Detail) -> None:
    """Each program gives the steps that its author would count, with their phases in order."""
    with recorded(detail) as run:
        program()
    assert [_phases(step) for step in run.steps] == steps
    assert [step.attributes["torch.step.number"] for step in run.steps] == list(range(len(steps)))
    assert run.evaluations == []
    spans = [span.name for step in run.steps for span in step.walk()]
    assert ("forward Sequential" in spans) == (detail == "all")
    assert ("backward Sequential" in spans) == (detail == "all")


@pytest.mark.parametrize("detail", ["all", "off"])
def test_validation_between_epochs(detail: Detail) -> None:
    """Validation batches are evaluations of their own, and no step reaches into them."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with recorded(detail) as run:
        for _ in range(2):
            for (x,) in _loader(2):
                _loss(net, x).backward()
                optimizer.step()
            with torch.no_grad():
                for (x,) in _loader(3):
                    net(x)
    assert [_phases(step) for step in run.steps] == ["DDFBO", "DFBO"] * 2
    assert [_phases(evaluation) for evaluation in run.evaluations] == ["DD", "D", "D"] * 2
    _none_overlap(run)


@pytest.mark.parametrize("detail", ["all", "off"])
def test_a_metric_that_is_a_module(detail: Detail) -> None:
    """A metric called after the optimizer is an evaluation, and no step is longer for it."""
    net, metric = _net(), nn.MSELoss()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with recorded(detail) as run:
        for (x,) in _loader(2):
            loss = _loss(net, x)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                metric(loss, torch.zeros(()))
    assert [_phases(step) for step in run.steps] == ["DDFBO", "DFBO"]
    assert len(run.evaluations) == 2
    _none_overlap(run)


@pytest.mark.parametrize("detail", ["all", "off"])
def test_serving_makes_evaluations(detail: Detail) -> None:
    """Forwards that nothing trains on are evaluations, one a call, and no step."""
    net = _net()
    with recorded(detail) as run, torch.no_grad():
        for _ in range(3):
            net(torch.randn(1, 4))
    assert run.steps == []
    assert len(run.evaluations) == 3


def _none_overlap(run: Run) -> None:
    units = sorted([*run.steps, *run.evaluations], key=_first_event_ns)
    assert all(one.end_ns <= _first_event_ns(following) for one, following in pairwise(units))


def _first_event_ns(unit: Seen) -> int:
    between = unit.find_all("torch.between")
    return between[0].end_ns if between else unit.start_ns
