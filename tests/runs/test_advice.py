"""Test each rule of the advice on a real run to which it applies, and on one to which it does not."""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.recorded_runs import advice, recorded, train
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import torchotel
from torchotel._records import PHASES
from torchotel.runs import open_run
from torchotel.runs.compare import WARM_UP_STEPS
from torchotel.runs.html import Content, document, gather
from torchotel.runs.html.advice import HOOKS_S, ROOT_CALL_HOOKS_S, advise, after_warm_up, phase_shares
from torchotel.runs.html.timeline_figure import section

STEPS = 24
EVEN_S = 0.015


class Wait(torch.autograd.Function):
    """Sleep for some time in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Busy(nn.Linear):
    """A layer that takes some time."""

    def __init__(self, forward_s: float = 0.0, backward_s: float = 0.0) -> None:
        super().__init__(8, 8)
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Wait.apply(super().forward(x), self.forward_s, self.backward_s)
        return out


def net(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*(layers or [Busy(EVEN_S, EVEN_S) for _ in range(4)]))


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Content:
    """Record a run without advice: four layers that take the same time in every step."""
    return recorded(tmp_path_factory.mktemp("even"), lambda: train(net(), STEPS), detail="all")


def loop(model: nn.Module, batches: Iterable[Tensor], pause: Callable[[], None] = lambda: None) -> None:
    """Train on batches, with a pause between backward and optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        pause()
        optimizer.step()


class Slow(Dataset[Tensor]):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.01)
        return torch.rand(8)


def all_forward(content: Content) -> Content:
    """Return the run with steps that consist of a forward, so that the load of the machine does not matter."""
    forward_only = tuple(float(phase == "forward") for phase in PHASES)
    steps = [one._replace(duration_s=1.0, phases_s=forward_only) for one in content.series.steps]
    return replace(content, series=replace(content.series, steps=steps))


def test_nothing_stands_out_in_an_even_run(even: Content) -> None:
    assert advise(even) == []


def test_waiting_for_data(tmp_path: Path) -> None:
    content = recorded(tmp_path, lambda: loop(net(Busy(0.005)), DataLoader(Slow())))
    assert advice(content, "Waiting for data takes") is not None


def test_time_between_steps(tmp_path: Path) -> None:
    """Iterate over batches without a DataLoader."""

    def batches() -> Iterator[Tensor]:
        for _ in range(STEPS):
            time.sleep(0.01)
            yield torch.rand(4, 8)

    content = recorded(tmp_path, lambda: loop(net(Busy(0.005)), batches()))
    assert advice(content, "of the time passes between steps") is not None


def test_time_in_no_phase(tmp_path: Path) -> None:
    content = recorded(tmp_path, lambda: loop(net(Busy(0.005)), torch.rand(STEPS, 4, 8), lambda: time.sleep(0.01)))
    assert advice(content, "of the time is in no phase") is not None


def test_an_optimizer_that_takes_much(tmp_path: Path) -> None:
    class Slowly(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            time.sleep(0.01)
            return super().step(closure)

    def program() -> None:
        model = net(Busy(0.005))
        optimizer = Slowly(model.parameters(), 0.01)
        for _ in range(STEPS):
            model(torch.rand(4, 8)).sum().backward()
            optimizer.step()

    content = recorded(tmp_path, program)
    assert advice(content, "The optimizer takes") is not None


def test_one_step_decides_no_advice_on_a_phase(tmp_path: Path) -> None:
    """One slow step does not change the shares of phases in a typical step."""

    def pauses() -> Iterator[float]:
        yield from (2.0 if step == 15 else 0.0 for step in range(STEPS))

    pause = pauses()
    content = recorded(
        tmp_path, lambda: loop(net(Busy(0.01)), torch.rand(STEPS, 4, 8), lambda: time.sleep(next(pause)))
    )
    assert phase_shares(after_warm_up(content))["other"] > 0.5
    assert advice(content, "of the time is in no phase") is None
    slow = advice(content, "took more than 2 times the median")
    assert slow is not None
    assert "The slowest is step 15" in slow.text
    page = document(content)
    assert "of its time goes to <b>forward</b>" in page
    assert "without the first 10 and the slowest 1" in page


def test_one_share_of_a_phase_in_the_whole_page(tmp_path: Path) -> None:
    """The sentence, the tile, the bar and the advice are of the same steps."""
    content = recorded(tmp_path, lambda: loop(net(Busy(0.005)), DataLoader(Slow())))
    page = document(content)
    patterns = (
        r"(\d+)% of its time goes to <b>waiting for data",
        r"waiting for data</dt><dd>(\d+)%",
        r"data <b>(\d+)%",
        r"Waiting for data takes (\d+)%",
    )
    assert len({re.findall(pattern, page)[0] for pattern in patterns}) == 1


def test_a_wait_in_every_fourth_step(tmp_path: Path) -> None:
    """Waits for workers in every fourth step are not outliers, although most steps do not wait."""

    def waits() -> Iterator[float]:
        yield from (0.05 if step % 4 == 0 else 0.0 for step in range(STEPS))

    wait = waits()
    content = recorded(tmp_path, lambda: loop(net(Busy(0.01)), torch.rand(STEPS, 4, 8), lambda: time.sleep(next(wait))))
    assert advice(content, "of the time is in no phase") is not None


def test_slow_steps(tmp_path: Path) -> None:
    """The advice names the phase of the slowest step, the phase of most slow steps, and whether they were recorded."""
    layer = Busy()

    def batches() -> Iterator[Tensor]:
        for step in range(STEPS):
            layer.forward_s = 0.3 if step in {14, 16, 18} else 0.02
            layer.backward_s = 0.6 if step == 20 else 0.0
            yield torch.rand(4, 8)

    content = recorded(tmp_path, lambda: loop(net(layer), batches()), detail=3)
    found = advice(content, "steps took more than 2 times the median")
    assert found is not None
    assert "of that in <b>forward</b> beyond what is usual. The slowest is step 20" in found.text
    assert found.text.index("<b>forward</b>") < found.text.index("step 20") < found.text.index("<b>backward</b>")
    assert "its modules were not recorded. With <code>torchotel run --detail all</code>" in found.text
    timeline = section(content)
    assert timeline is not None
    assert "With <code>torchotel run --detail all</code> every step has its modules" in timeline.lead


def test_a_slow_step_with_its_modules(tmp_path: Path) -> None:
    layer = Busy()

    def batches() -> Iterator[Tensor]:
        for step in range(STEPS):
            layer.forward_s = 1.0 if step == 15 else 0.1
            yield torch.rand(4, 8)

    content = recorded(tmp_path, lambda: loop(net(layer), batches()), detail="all")
    found = advice(content, "1 step took more than 2 times the median")
    assert found is not None
    assert "Together" not in found.text
    assert found.text.endswith('Its modules are in <a href="#timeline">the timeline</a>.')


def layer_of(name: str) -> nn.Module:
    """Return a layer of a class of this name that takes most of the time."""
    made: nn.Module = type(name, (Busy,), {})(0.02, 0.0)
    return made


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("Linear", "a lower precision"),
        ("Conv2d", "<code>channels_last</code>"),
        ("Conv3d", "<code>channels_last_3d</code>"),
        ("ContrastiveLoss", "grows with the outputs"),
        ("Mystery", "Start there"),
    ],
)
def test_a_layer_that_dominates(tmp_path: Path, name: str, remedy: str) -> None:
    """The advice depends on the class of the module."""
    model = net(Busy(0.002), layer_of(name), Busy(0.002))
    found = advice(recorded(tmp_path, lambda: train(model, 6), detail="all"), "of the forward")
    assert found is not None
    assert f"<code>1</code> ({name})" in found.text
    assert remedy in found.text
    assert "compile" not in found.text
    assert ("channels_last" in found.text) == name.startswith("Conv")


def test_a_container_that_dominates(tmp_path: Path) -> None:
    """A container's own code takes the time, so the advice names no memory format and no precision."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.02)
            out: Tensor = self.inner(x)
            return out

    found = advice(recorded(tmp_path, lambda: train(net(Block(), Busy()), 6), detail="all"), "of the forward")
    assert found is not None
    assert "<code>0</code> (Block)" in found.text
    assert "time of its own code, outside of the modules in it" in found.text


def test_a_loss_that_is_made_in_forward(tmp_path: Path) -> None:
    """A loss that is created in forward is a layer of the model, although its path is its class."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Busy(), Busy()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = layer_of("ContrastiveLoss")(self.second(self.first(x)))
            return out

    found = advice(recorded(tmp_path, lambda: train(Net(), 6), detail="all"), "of the forward")
    assert found is not None
    assert "<code>ContrastiveLoss</code> (ContrastiveLoss)" in found.text
    assert "grows with the outputs" in found.text


def test_a_forward_that_is_outside_of_modules(tmp_path: Path) -> None:
    """A layer that takes most of the modules' time does not dominate a forward that is mostly outside modules."""

    def loss(_: int, output: Tensor) -> Tensor:
        time.sleep(0.03)
        return output.pow(2).mean()

    content = recorded(tmp_path, lambda: train(net(Busy(), Busy(0.005), Busy()), STEPS, loss=loss), detail="all")
    assert content.summary.forward[0].share > 0.5
    found = advice(content, "of the forward")
    assert found is not None
    assert re.fullmatch(r"\d\d% of the forward is outside of modules", found.title)
    assert [one for one in advise(content) if "of the forward" in one.title] == [found]


def test_no_advice_rests_on_the_time_of_hooks(tmp_path: Path) -> None:
    """The time of torchotel's hooks is most of a small container's self time, and causes no advice."""
    model = net(nn.Linear(8, 8), nn.Sequential(*(nn.Identity() for _ in range(60))), nn.Linear(8, 8))
    content = all_forward(recorded(tmp_path, lambda: train(model, 6), detail="all"))
    (container,) = [layer for layer in content.summary.forward if layer.path == "1"]
    assert container.inner_calls == 60 * container.calls
    others = [layer._replace(self_s=0.0) for layer in content.summary.forward if layer is not container]

    def advised(self_s: float) -> Any:
        """Return the advice on a run in which this container's self time is the whole forward."""
        layers = [container._replace(self_s=self_s, total_s=self_s, longest_s=0.0), *others]
        steps = [content.summary.module_steps[0]._replace(forward_s=self_s, root_calls_s=self_s)]
        return advice(
            replace(content, summary=replace(content.summary, forward=layers, module_steps=steps)), "of the forward"
        )

    hooks_s = HOOKS_S * container.inner_calls
    assert advised(hooks_s) is None
    assert advised(10 * hooks_s) is not None


def test_one_slow_call_does_not_dominate(tmp_path: Path) -> None:
    """A single slow call, such as the first call of a layer, causes no advice."""
    layer = Busy()

    def batches() -> Iterator[Tensor]:
        for step in range(STEPS):
            layer.forward_s = 0.5 if step == 0 else 0.001
            yield torch.rand(4, 8)

    model = net(*(Busy(0.005) for _ in range(4)), layer)
    content = recorded(tmp_path, lambda: loop(model, batches()), detail="all")
    assert content.summary.forward[0].path == "4"
    assert advice(content, "One module takes") is None


def test_a_slow_first_call_does_not_hide_a_layer_that_dominates(tmp_path: Path) -> None:
    """The first layer of a model may wait for the start of the device."""
    first = Busy()

    def batches() -> Iterator[Tensor]:
        for step in range(STEPS):
            first.forward_s = 1.0 if step == 0 else 0.0
            yield torch.rand(4, 8)

    content = recorded(tmp_path, lambda: loop(net(first, Busy(0.02), Busy(0.002)), batches()), detail="all")
    assert content.summary.forward[0].path == "0"
    found = advice(content, "of the forward")
    assert found is not None
    assert "<code>1</code> (Busy)" in found.text


def test_the_warm_up_is_not_outside_of_modules(tmp_path: Path) -> None:
    """A loss that is slow in the first ten steps causes no advice."""

    def loss(step: int, output: Tensor) -> Tensor:
        time.sleep(0.05 if step < WARM_UP_STEPS else 0.0)
        return output.pow(2).mean()

    content = recorded(tmp_path, lambda: train(net(Busy(0.005)), 2 * WARM_UP_STEPS, loss=loss), detail="all")
    assert advice(content, "outside of modules") is None


def test_a_logged_value_that_is_not_finite(tmp_path: Path) -> None:
    """The loss and the gradients are finite, so no other advice shows the value."""
    bad = torch.tensor(float("nan"))

    def loss(_: int, output: Tensor) -> Tensor:
        torchotel.log(val_loss=bad, aux_loss=bad.nan_to_num())
        return output.pow(2).mean()

    content = recorded(tmp_path, lambda: train(net(), 3, loss=loss))
    found = advice(content, "val_loss was NaN or infinite 3 times")
    assert found is not None
    assert advice(content, "aux_loss") is None


def test_a_small_model_is_not_outside_of_modules(tmp_path: Path) -> None:
    """torchotel's hooks around the root call, and a slow first loss, cause no advice."""
    content = all_forward(recorded(tmp_path, lambda: train(net(nn.Linear(8, 8)), 6), detail="all"))

    def advised(*forward_s: float) -> Any:
        step = content.summary.module_steps[0]._replace(root_calls_s=0.0, root_calls=1)
        steps = [step._replace(forward_s=one) for one in forward_s]
        return advice(replace(content, summary=replace(content.summary, module_steps=steps)), "outside of modules")

    assert advised(0.5, ROOT_CALL_HOOKS_S, ROOT_CALL_HOOKS_S) is None
    assert advised(0.5, 100 * ROOT_CALL_HOOKS_S, 100 * ROOT_CALL_HOOKS_S) is not None


def test_steps_that_become_slower(tmp_path: Path) -> None:
    layer = Busy()

    def batches() -> Iterator[Tensor]:
        for step in range(60):
            layer.forward_s = 0.005 + 0.001 * step
            yield torch.rand(4, 8)

    assert advice(recorded(tmp_path, lambda: loop(net(layer), batches())), "slower over the run") is not None


def test_gradients_that_vanish(tmp_path: Path) -> None:
    """Advice on vanishing gradients: five saturated layers, of which the first gets very small gradients."""

    def saturated(factor: float) -> nn.Sequential:
        model = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(8, 8), nn.Sigmoid())))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        return model

    vanishing = recorded(tmp_path / "a", lambda: train(saturated(0.1), 5), detail="all")
    found = advice(vanishing, "Gradients vanish in")
    assert found is not None
    assert "<code>0</code>" in found.text
    sound = recorded(tmp_path / "b", lambda: train(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), 5), detail="all")
    assert advice(sound, "Gradients vanish") is None


def test_a_gradient_norm_that_jumps(tmp_path: Path) -> None:
    def loss(step: int, output: Tensor) -> Tensor:
        return output.mean() * (1000.0 if step == 12 else 1.0)

    content = recorded(tmp_path, lambda: train(nn.Linear(8, 1), 15, loss=loss, lr=1e-6), gradient_norms=True)
    found = advice(content, "The gradient norm jumped to")
    assert found is not None
    assert "at step 12" in found.text


@pytest.mark.parametrize(("detail", "said"), [("off", True), (5, True), (2, False), ("all", False)])
def test_too_little_detail(tmp_path: Path, detail: Any, said: bool) -> None:  # noqa: FBT001  # a test parameter
    content = recorded(tmp_path, lambda: train(nn.Linear(8, 1), 12), detail=detail)
    assert (advice(content, "recorded in detail") is not None) == said


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    """A running run is reported as not ended; after its end, it is not."""
    quiet = {"traces_exporter": "none", "metrics_exporter": "none"}
    with torchotel.instrument(record=tmp_path / "run", **quiet) as handle:  # type: ignore[arg-type]  # the settings are a dict of several types
        train(nn.Linear(8, 1), 12)
        handle.flush()
        assert advice(gather(open_run(tmp_path / "run")), "The run has not ended") is not None
    assert advice(gather(open_run(tmp_path / "run")), "The run has not ended") is None
