"""Forwards that hand parts of their work to threads: DataParallel's replicas, and threads of the program's own."""

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from support.recorded_training import tree
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchotel.testing import CapturedSpan, capture

ROWS = torch.arange(16.0).reshape(4, 4) / 16


class Copied(torch.autograd.Function):
    """Copies all parameters at once: its backward comes when all others have ended."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def copy_of(module: nn.Module) -> nn.Module:
    """Copy a module as `torch.nn.parallel.replicate` does, whose copying of tensors only GPUs have."""
    parameters = list(module.parameters())
    copied = dict(zip(parameters, Copied.apply(*parameters), strict=True))

    def copy(one: Any) -> Any:
        replica = one._replicate_for_data_parallel()
        replica._former_parameters = {name: copied[own] for name, own in one._parameters.items() if own is not None}
        for name, tensor in replica._former_parameters.items():
            setattr(replica, name, tensor)
        for name, child in one.named_children():
            setattr(replica, name, copy(child))
        return replica

    return copy(module)  # type: ignore[no-any-return]  # a private function of torch has no type


def on_threads(modules: list[nn.Module], rows: Tensor) -> Tensor:
    """Give each module its share of the rows, on a thread of its own."""
    outputs: dict[int, Tensor] = {}

    def work(index: int, module: nn.Module, share: Tensor) -> None:
        outputs[index] = module(share)

    shares = rows.chunk(len(modules))
    threads = [
        threading.Thread(target=work, args=(n, *pair)) for n, pair in enumerate(zip(modules, shares, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat([outputs[index] for index in range(len(modules))])


class Meeting(nn.Tanh):
    """Waits until both replicas are in it, so that they overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.both = threading.Barrier(2)

    def forward(self, x: Tensor) -> Tensor:
        """Wait, where it is a replica's forward, then compute."""
        if threading.current_thread() is not threading.main_thread():
            self.both.wait(60)
        return super().forward(x)


class OnThreads(nn.DataParallel[nn.Module]):
    """DataParallel over two devices, both the CPU, also where there is a GPU."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run two replicas."""
        return on_threads([copy_of(self.module) for _ in range(2)], inputs[0])


class Model(nn.Module):
    """A layer before and a layer behind what runs in parallel."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.parts = wrap(nn.Sequential(nn.Linear(4, 4), Meeting(), nn.Linear(4, 4)))

    def forward(self, x: Tensor) -> Any:
        """Run all three."""
        return self.b(self.parts(self.a(x)))


class Checkpointed(nn.Module):
    """Runs what it holds again in the backward."""

    def __init__(self, inner: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, x: Tensor) -> Any:
        """Run it."""
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Branches(nn.Module):
    """Runs its modules on threads as they are."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Any:
        """Run them."""
        return on_threads(list(self.branches), x)


def train(model: nn.Module, steps: int = 3) -> list[Tensor]:
    """Train some steps; give all that was computed."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    numbers: list[Tensor] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(ROWS.to(next(model.parameters()).device)).square().sum()
        loss.backward()
        optimizer.step()
        numbers += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return [*numbers, *(parameter.detach().clone() for parameter in model.parameters())]


def side_by_side(direction: str) -> Any:
    """Give what two replicas look like below what runs them."""
    layers = [f"{direction} parts.{number}" for number in (range(3) if direction == "forward" else range(2, -1, -1))]
    return (f"{direction} parts", [(f"{direction} parts", layers)] * 2)


def assert_replicas_are_in_the_step(step: CapturedSpan) -> None:
    forward = ("torch.forward", [("forward Model", ["forward a", side_by_side("forward"), "forward b"])])
    backward = ("torch.backward", [("backward Model", ["backward b", side_by_side("backward"), "backward a"])])
    assert tree(step) == ("torch.step", [forward, backward, "torch.optimizer.step"])
    assert not any("torch.estimated" in span.attributes for span in step.walk())


def test_replicas_are_part_of_the_forward_that_waits_for_them() -> None:
    """Each replica stands below what runs it, under the names of what it copies, and changes no number."""
    expected = train(Model(OnThreads))
    with capture() as captured:
        numbers = train(Model(OnThreads))
    assert all(torch.equal(one, other) for one, other in zip(numbers, expected, strict=True))
    assert captured.evaluations == []
    for step in captured.steps:
        assert_replicas_are_in_the_step(step)
        layers = [span for span in step.walk() if span.name == "forward parts.0"]
        assert {span.attributes["torch.call.index"] for span in layers} == {0, 1}
        assert {span.attributes["torch.module.parameters"] for span in layers} == {20}
    assert captured.handle.stats()["internal_errors"] == 0


def test_a_replicas_layer_ends_within_its_replica() -> None:
    """Also the backward of a layer is its own, and not that of the copying of parameters, which runs last."""
    with capture() as captured:
        train(Model(OnThreads))
    for step in captured.steps:
        for replica in step.find("backward Model").children[1].children:
            last, middle, first = replica.children
            assert last.end_ns <= middle.start_ns <= middle.end_ns <= first.start_ns


def test_replicas_without_detail() -> None:
    """With the module hooks out the replicas open nothing."""
    with capture(detail="off") as captured:
        train(Model(OnThreads))
    assert [tree(step) for step in captured.steps] == [
        ("torch.step", ["torch.forward", "torch.backward", "torch.optimizer.step"])
    ] * 3
    assert captured.evaluations == []


def test_replicas_that_are_evaluated() -> None:
    """An evaluation has its replicas too."""
    with capture() as captured, torch.no_grad():
        Model(OnThreads)(ROWS)
    (evaluation,) = captured.evaluations
    assert tree(evaluation) == (
        "torch.evaluation",
        [("forward Model", ["forward a", side_by_side("forward"), "forward b"])],
    )


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_replicas_that_are_run_again(*, use_reentrant: bool) -> None:
    """What a checkpoint runs again has the names of the model, though what held it is gone by then."""
    with capture() as captured:
        train(Model(lambda parts: OnThreads(nn.Sequential(Checkpointed(parts, use_reentrant=use_reentrant)))))
    for step in captured.steps:
        again = [span for span in step.walk() if "torch.recompute" in span.attributes]
        names = ("", ".0", ".1", ".2")
        assert Counter(span.name for span in again) == {f"forward parts.0.inner{name}": 2 for name in names}
        assert {span.attributes["torch.model"] for span in step.walk() if "torch.direction" in span.attributes} == {
            "Model"
        }
    assert captured.evaluations == []


class Paused(nn.Module):
    """Does what it is given amid its forward."""

    def __init__(self, inner: nn.Module, work: Callable[[], object]) -> None:
        super().__init__()
        self.inner, self.work = inner, work

    def forward(self, x: Tensor) -> Any:
        """Work, then run what it holds."""
        self.work()
        return self.inner(x)


def test_replicas_join_no_forward_of_another_model(caplog: pytest.LogCaptureFixture) -> None:
    """A forward that runs meanwhile, of a model that holds none of their class, has no part in them: told once."""
    replicas = [copy_of(nn.Sequential(nn.Tanh(), nn.Linear(4, 4))) for _ in range(2)]
    with capture() as captured, torch.no_grad():
        Paused(nn.Linear(4, 4), lambda: on_threads(replicas, ROWS))(ROWS)
    (evaluation,) = captured.evaluations
    assert tree(evaluation) == ("torch.evaluation", [("forward Paused", ["forward inner"])])
    assert captured.handle.stats()["calls_dropped"] == 6
    assert ["replicas of a Sequential" in record.getMessage() for record in caplog.records] == [True]


def test_replicas_of_a_model_that_two_threads_forward_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Whose they are can't be told: neither has them, they are counted as dropped, and the user is told once."""
    models = [Paused(nn.Sequential(nn.Linear(4, 4)), threading.Barrier(2).wait) for _ in range(2)]
    both = threading.Barrier(2)

    def work(one: nn.Module) -> None:
        both.wait(60)
        on_threads([copy_of(one)], ROWS)
        both.wait(60)

    for model in models:
        model.work = partial(work, model.inner)
    with capture() as captured:
        on_threads(list(models), ROWS)
    assert [tree(one) for one in captured.evaluations] == [
        ("torch.evaluation", [("forward Paused", [("forward inner", ["forward inner.0"])])])
    ] * 2
    assert captured.handle.stats()["calls_dropped"] == 4
    assert ["replicas of a Sequential" in record.getMessage() for record in caplog.records] == [True]


class Stop(BaseException):
    """Ends a thread."""


class Stopped(nn.Linear):
    """Raises in a replica, and keeps what its weight was made of."""

    made: weakref.ref[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """Raise."""
        type(self).made = weakref.ref(self._former_parameters["weight"])  # type: ignore[index]  # a private attribute of torch has no type
        raise Stop


def test_a_replica_that_is_interrupted_is_let_go_with_its_forward() -> None:
    """No tensor and no module of its is kept when the forward that waited for it has ended."""
    held = Stopped(4, 4)

    def work() -> None:
        def replicate() -> None:
            with suppress(Stop):
                copy_of(held)(ROWS)

        thread = threading.Thread(target=replicate)
        thread.start()
        thread.join()

    with capture() as captured:
        model = Paused(nn.Identity(), work)
        model.held = held
        model(ROWS)
        gc.collect()
        assert Stopped.made() is None
    assert "forward Stopped" in {span.name for span in captured.evaluations[0].walk()}


def test_a_thread_of_the_programs_own_is_an_evaluation() -> None:
    """Nobody says whose work it does; its backward is in another's step, and no span says it ran before."""
    with capture() as captured:
        train(Branches(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert len(captured.steps) == 3
    assert len(captured.evaluations) == 6
    assert {tree(evaluation)[1][0] for evaluation in captured.evaluations} == {
        "forward branches.0",
        "forward branches.1",
    }
    assert all(len(evaluation.children) == 1 for evaluation in captured.evaluations)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: one makes no replicas")
def test_replicas_on_devices() -> None:
    """PyTorch's own DataParallel: each replica's spans say their device."""
    model = Model(partial(nn.DataParallel[nn.Module], device_ids=[0, 1])).cuda()
    with capture() as captured:
        train(model)
    for step in captured.steps:
        assert_replicas_are_in_the_step(step)
        layers = [span for span in step.walk() if span.name == "forward parts.0"]
        assert {span.attributes["torch.device"] for span in layers} >= {"cuda:0", "cuda:1"}
