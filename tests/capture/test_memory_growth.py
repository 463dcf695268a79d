"""Nothing of ours grows with the steps."""

import gc
from collections.abc import Callable
from types import CodeType, ModuleType

import pytest
import torch
from support.recorded_training import recorded
from support.simulated_device_clock import DeviceClock, net
from support.single_step_training import Model, train
from torch import Tensor, nn

import torchotel
from torchotel.capture import autograd_hooks
from torchotel.capture.recorder import Capture
from torchotel.sampling.detail import Detail

ROWS = torch.arange(8.0).reshape(2, 4) / 8


class Cached(nn.Module):
    """Computes its output once and returns it ever after."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.layer(x)
        return self.kept


def test_reused_tensors_gather_no_hooks() -> None:
    """A leaf that goes in at every step, and a node that comes out at every step, are hooked once at most."""
    leaf = ROWS.clone().requires_grad_()
    model = Model(lambda m, x: m.a(x) + m.cached(x), cached=Cached())
    spare = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    with recorded() as run:
        for _ in range(50):
            model(leaf).sum().backward(retain_graph=True)
            spare.step()
    assert leaf._backward_hooks is None
    sizes = [len(list(step.walk())) for step in run.steps[10:]]
    assert sizes == [sizes[0]] * 40


def step_of_same_model() -> Callable[[], object]:
    model = Model(lambda m, x: m.b(m.a(x)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        model(ROWS).sum().backward()
        optimizer.step()

    return step


def evaluation_of_same_model() -> Callable[[], object]:
    model = Model(lambda m, x: m.b(m.a(x)))
    return torch.no_grad()(lambda: model(ROWS))


def step_of_new_model() -> Callable[[], object]:
    return lambda: train(Model(lambda m, x: m.b(m.a(x))), ROWS)


def reachable(*tops: object) -> int:
    """Count all objects that some others lead to, classes, modules and what they define left out."""
    todo, seen = list(tops), set()
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | CodeType):
            continue
        if isinstance(one, dict) and "__builtins__" in one:
            continue
        seen.add(id(one))
        todo += gc.get_referents(one)
    return len(seen)


@pytest.mark.parametrize("detail", ["all", "off", 3])
@pytest.mark.parametrize("program", [step_of_same_model, evaluation_of_same_model, step_of_new_model])
def test_capture_does_not_grow(program: Callable[[], Callable[[], object]], detail: str | int) -> None:
    """After 221 steps capture holds as many objects as after 21: not even one more for every other step."""
    step = program()
    held = []
    capture = Capture(lambda unit: None, Detail(detail))
    capture.install()
    try:
        for steps in (21, 200):
            for _ in range(steps):
                step()
            capture.flush()
            held.append(reachable(capture, capture.current_thread.state))
    finally:
        capture.uninstall()
    assert abs(held[1] - held[0]) < 100 < held[0]


def test_a_graph_that_runs_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step keeps so many moments of backwards and no more; what is beyond is counted, and the step is there."""
    monkeypatch.setattr(autograd_hooks, "MAX_STEP_TIMESTAMPS", 40)
    with recorded() as run, torchotel.step():
        loss = Model(lambda m, x: m.b(m.a(x)))(ROWS).sum()
        for _ in range(30):
            loss.backward(retain_graph=True)
    assert len(run.steps) == 1
    assert run.handle.stats()["stamps_dropped"] > 0


def test_a_graph_that_outlives_us() -> None:
    """Its hooks keep nothing once we are gone, on the host or on a device."""
    clock = DeviceClock()
    capture = Capture(lambda _: None, Detail("all"), clock=clock)
    capture.install()
    loss = net(clock)(ROWS).sum()
    loss.backward(retain_graph=True)
    capture.uninstall()
    capture.end()
    made = clock.made
    for _ in range(5):
        loss.backward(retain_graph=True)
    (thread,) = capture.threads.all
    assert (len(thread.calls.backward.log.timestamps), thread.calls.device_log.drain(), clock.made) == (0, None, made)
