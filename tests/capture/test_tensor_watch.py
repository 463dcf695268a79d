"""Gradients of watched tensors."""

import copy
import gc
import io
import logging
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
from fidelity.norms import true_norm
from support.gradient_norm_training import ROWS, Recorded, captured, net, trained
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchotel._limits import MAX_WATCH_NAMES, MAX_WATCHED
from torchotel._records import TensorGradient
from torchotel.capture.recorder import Capture


def gradients(recorded: Recorded) -> list[TensorGradient]:
    return [gradient for step in recorded.steps for gradient in step.tensor_gradients]


class Watching(nn.Module):
    """Watches what its first layer gives, inside its forward."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)
        self._capture = [capture]
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        self._capture[0].watches.watch(hidden, "hidden")
        return self.second(hidden.tanh())


def test_the_gradient_of_an_intermediate_tensor() -> None:
    """y = x + 2, z = mean(y²), x = [1, 2]: the gradient of y is [3, 4], its norm 5, told at its own time."""
    with captured() as (seen, capture):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        y = x + 2
        capture.watches.watch(y, "y")
        (y**2).mean().backward()
    (gradient,) = gradients(seen)
    assert (gradient.name, gradient.shape, gradient.norm) == ("y", "2", 5.0)
    (backward,) = seen.steps[0].phases
    assert backward.start_ns < gradient.time_ns < backward.end_ns


def test_inside_a_forward() -> None:
    """Each step has the gradient of its own tensor."""
    with captured() as (seen, capture):
        model = Watching(capture)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        true = []
        for _ in range(3):
            hidden = model.first(ROWS).detach().requires_grad_()
            (expected,) = torch.autograd.grad(model.second(hidden.tanh()).sum(), hidden)
            true.append(true_norm([expected]))
            model(ROWS).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [step.number for step in seen.steps for _ in step.tensor_gradients] == [0, 1, 2]
    assert [gradient.norm for gradient in gradients(seen)] == pytest.approx(true, rel=1e-6)
    assert {gradient.shape for gradient in gradients(seen)} == {"5x3"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(reentrant: bool) -> None:  # noqa: FBT001  # a parameter of the test
    """A tensor of a forward that runs again is told of once a backward."""
    with captured() as (seen, capture):
        body, head = Watching(capture), nn.Linear(2, 1)
        trained(
            nn.Sequential(body, head),
            loss=lambda _: head(checkpoint(body, ROWS.clone().requires_grad_(), use_reentrant=reentrant)).sum(),
        )
    assert [len(step.tensor_gradients) for step in seen.steps] == [1, 1, 1]


def test_each_backward_of_a_graph() -> None:
    """With `retain_graph` each backward tells; a double backward tells of both of its gradients."""
    with captured() as (seen, capture):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        y = x + 2
        capture.watches.watch(y, "y")
        z = (y**2).mean()
        z.backward(retain_graph=True)
        z.backward()
        cube = x * 1
        capture.watches.watch(cube, "cube")
        (slope,) = torch.autograd.grad((cube**3).sum(), x, create_graph=True)
        slope.sum().backward()
    told = [(gradient.name, gradient.norm) for gradient in gradients(seen)]
    assert told == [
        ("y", 5.0),
        ("y", 5.0),
        ("cube", pytest.approx(true_norm([3 * x**2]))),
        ("cube", pytest.approx(true_norm([6 * x]))),
    ]


def test_the_value_at_the_time_of_the_call() -> None:
    """What changes a tensor in place afterwards does not change which gradient is told."""
    with captured() as (seen, capture):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        y = x + 2
        capture.watches.watch(y, "y")
        y.mul_(10)
        y.sum().backward()
    assert [gradient.norm for gradient in gradients(seen)] == [pytest.approx(true_norm([torch.full((2,), 10.0)]))]


def test_a_leaf_gathers_no_hooks() -> None:
    """A parameter that is watched in each step has one hook for each name, and is not kept alive."""
    with captured() as (seen, capture):
        weight = nn.Parameter(torch.ones(3))
        for _ in range(4):
            capture.watches.watch(weight, "weight")
            capture.watches.watch(weight, "the same")
            (weight * 2).sum().backward()
        assert len(weight._backward_hooks or ()) == 2
        gone = weakref.ref(weight)
        del weight
        gc.collect()
        assert gone() is None
        assert not capture.watches._leaves
    assert [gradient.norm for gradient in gradients(seen)] == pytest.approx([12**0.5] * 8)


def test_nothing_is_kept() -> None:
    """Neither a watched tensor nor its graph lives on, whether or not a backward came."""
    with captured() as (_, capture):
        for backward in (False, True):
            x = torch.ones(3, requires_grad=True)
            y = x * 2
            capture.watches.watch(y, "y")
            z = y.sum()
            if backward:
                z.backward()
            gone = [weakref.ref(y), weakref.ref(x)]
            del x, y, z
            assert [ref() for ref in gone] == [None, None]


def test_what_can_not_be_watched(caplog: pytest.LogCaptureFixture) -> None:
    """Each kind of mistake is warned of once, and nothing raises."""
    plain, good = torch.ones(2), torch.ones(2, requires_grad=True)
    with captured() as (seen, capture), caplog.at_level(logging.WARNING):
        for _ in range(3):
            capture.watches.watch("no tensor", "name")  # type: ignore[arg-type]  # what is to be tried
            capture.watches.watch(good, 3)  # type: ignore[arg-type]  # as above
            capture.watches.watch(good, "")
            capture.watches.watch(plain, "plain")
        (good * 2).sum().backward()
    assert [record.getMessage() for record in caplog.records] == [
        "watch takes a tensor, got str: it is not watched",
        "watch takes a name as a string, got 3: it is not watched",
        "watch: 'plain' does not require grad, so there is no gradient to watch",
    ]
    assert gradients(seen) == []


def test_evaluations_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Where gradients are off nobody expects one."""
    with captured() as (_, capture), caplog.at_level(logging.WARNING), torch.no_grad():
        Watching(capture)(ROWS)
    assert caplog.records == []


def test_names_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """Each name is a series of its own, so their number is limited; known ones go on."""
    with captured() as (seen, capture), caplog.at_level(logging.WARNING):
        x = torch.ones(2, requires_grad=True)
        for number in [*range(MAX_WATCH_NAMES + 5), 0]:
            y = x * 2
            capture.watches.watch(y, f"name {number}")
            y.sum().backward()
        capture.flush()
    assert len(gradients(seen)) == MAX_WATCH_NAMES + 1
    assert len(caplog.records) == 1


def test_gradients_of_a_step_are_bounded() -> None:
    """A tensor of every time step of a long sequence does not fill the memory."""
    with captured() as (seen, capture):
        x = torch.ones(2, requires_grad=True)
        for _ in range(MAX_WATCHED + 10):
            x = x * 1
            capture.watches.watch(x, "state")
        x.sum().backward()
    assert len(gradients(seen)) == MAX_WATCHED


def test_after_the_end() -> None:
    """Hooks that are left do nothing; leaves have none left."""
    leaf = torch.ones(2, requires_grad=True)
    with captured() as (seen, capture):
        y = leaf * 2
        capture.watches.watch(leaf, "leaf")
        capture.watches.watch(y, "y")
    assert not leaf._backward_hooks
    capture.watches.watch(leaf, "too late")
    assert not leaf._backward_hooks
    y.sum().backward()
    assert torch.equal(leaf.grad, torch.full((2,), 2.0))  # type: ignore[arg-type]  # the backward has set it
    assert gradients(seen) == []
    assert capture.current_thread.state.watched == []


def test_a_backward_on_another_thread() -> None:
    """The gradient belongs to the thread that watches."""
    with captured() as (seen, capture):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        y = x + 2
        capture.watches.watch(y, "y")
        z = (y**2).mean()
        thread = threading.Thread(target=z.backward)
        thread.start()
        thread.join()
        (x * 2).sum().backward()
    mine = threading.get_ident()
    assert [(step.thread == mine, len(step.tensor_gradients)) for step in seen.steps].count((True, 1)) == 1
    assert [gradient.norm for gradient in gradients(seen)] == [5.0]


def test_nothing_changes() -> None:
    """Gradients are bit for bit what they are without."""

    def run(capture: Capture | None) -> list[Tensor]:
        torch.manual_seed(1)
        model = net()
        hidden = model[0](ROWS)
        if capture is not None:
            capture.watches.watch(hidden, "hidden")
            capture.watches.watch(model[2].get_parameter("weight"), "weight")
        model[2](model[1](hidden)).sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain = run(None)
    with captured() as (seen, capture):
        observed = run(capture)
    assert len(gradients(seen)) == 2
    assert all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True))


def test_saving_and_copying() -> None:
    """A watched leaf can be saved and copied without a warning, and the copy is not watched."""
    with captured() as (seen, capture), warnings.catch_warnings():
        warnings.simplefilter("error")
        leaf = torch.ones(2, requires_grad=True)
        capture.watches.watch(leaf, "leaf")
        file = io.BytesIO()
        torch.save(leaf, file)
        file.seek(0)
        for other in (torch.load(file), copy.deepcopy(leaf)):
            other.sum().backward()
    assert gradients(seen) == []


def test_a_norm_that_is_not_known() -> None:
    """The gradient is told of all the same."""
    with captured() as (seen, capture):
        x = torch.ones(2, 3, device="meta", requires_grad=True)
        y = x * 2
        capture.watches.watch(y, "y")
        y.sum().backward()
    assert [(gradient.shape, gradient.norm) for gradient in gradients(seen)] == [("2x3", None)]


def test_beside_compiled_code() -> None:
    """What compiled code returns can be watched; a hook that compiled code gets to see does nothing there."""
    with captured() as (seen, capture):

        @torch.compile(backend="eager", fullgraph=True)
        def double(x: Tensor) -> Tensor:
            return x * 2

        x = torch.tensor([1.0, 2.0], requires_grad=True)
        y = double(x)
        capture.watches.watch(y, "y")
        y.sum().backward()
    assert [gradient.norm for gradient in gradients(seen)] == [pytest.approx(2**0.5)]


def test_compiled_autograd() -> None:
    """A backward that compiled autograd runs computes what it computes without, and tells the same."""
    with captured() as (seen, capture):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        y = x + 2
        capture.watches.watch(y, "y")
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            (y**2).mean().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 4.0]
    assert [gradient.norm for gradient in gradients(seen)] == [5.0]
