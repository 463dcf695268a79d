"""Threads whose forwards run at the same time, as those of a server do: none is missed, none ends for another."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.recorded_training import recorded
from support.single_step_training import Model
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

ROW = torch.ones(1, 4)
WAIT_S = 30


class Stops(nn.Module):
    """A layer that waits inside its forward, where it is told to, until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inside, self.may_go_on = threading.Event(), threading.Event()
        self.stops = False

    def forward(self, x: Tensor) -> Tensor:
        if self.stops:
            self.inside.set()
            assert self.may_go_on.wait(WAIT_S)
        return self.linear(x)  # type: ignore[no-any-return] # torch has it so


@torch.inference_mode()
def evaluate(model: nn.Module) -> None:
    """Run one forward."""
    model(ROW)


@contextmanager
def running(stops: Stops, work: Callable[[], object]) -> Iterator[int]:
    """Run the block while a thread of its own, which is told, is inside the layer's forward; wait for its end."""
    stops.stops = True
    thread = threading.Thread(target=work)
    thread.start()
    assert stops.inside.wait(WAIT_S)
    stops.stops = False
    try:
        assert thread.ident is not None
        yield thread.ident
    finally:
        stops.may_go_on.set()
        thread.join(WAIT_S)


def test_a_threads_first_forward_is_seen_while_another_runs() -> None:
    """Nobody knows of the thread before: what waits for a forward must be in all the time."""
    stops, other = Stops(), nn.Linear(4, 4)
    with recorded("off") as run, running(stops, lambda: evaluate(stops)):
        evaluate(other)
        evaluate(other)
    assert len(run.evaluations) == 3


def test_an_end_is_seen_whatever_detail_other_threads_have() -> None:
    """Hooks that are in for their evaluations may go out before this one ends, and it lasts until its end."""
    first, later, other = Stops(), Stops(), nn.Linear(4, 4)
    with recorded(4) as run:
        with running(first, lambda: (evaluate(first), evaluate(other))):
            evaluate(other)  # in detail as the first, which has not ended
            done = running(later, lambda: evaluate(later))
            ident = done.__enter__()  # without detail, while hooks are in
        evaluate(other)
        done.__exit__(None, None, None)
    (slow,) = [one for one in run.evaluations if one.attributes["thread.id"] == ident]
    inside = run.evaluations[-1]
    assert slow.tree() == inside.tree() == "torch.evaluation"
    assert slow.end_ns - slow.start_ns > inside.end_ns - inside.start_ns


def test_hooks_go_out_with_the_evaluation_that_they_were_in_for() -> None:
    """Its thread may idle for long, and others would pay for every call."""
    seen: list[int] = []

    def looks(model: Any, x: Tensor) -> Any:
        seen.append(len(nn_module._global_forward_hooks))
        return model.a(x)

    model = Model(looks)
    done, may_end = threading.Event(), threading.Event()

    def evaluates_and_idles() -> None:
        evaluate(model)
        done.set()
        assert may_end.wait(WAIT_S)

    thread = threading.Thread(target=evaluates_and_idles)
    with recorded(100):
        thread.start()
        assert done.wait(WAIT_S)
        evaluate(model)
        may_end.set()
        thread.join()
    assert seen == [1, 0]


def test_a_call_that_raises_while_anothers_evaluation_ends() -> None:
    """PyTorch reads the global hooks then, which must not go out meanwhile, or its error stands for the program's."""
    stops = Stops()

    def raises(_: Any, x: Tensor) -> Tensor:
        raise ValueError("bad")

    def others_evaluation_ends(module: nn.Module, _: Any, output: Any) -> None:
        if module is bad:
            stops.may_go_on.set()
            thread.join(WAIT_S)

    bad, thread = Model(raises), threading.Thread(target=evaluate, args=[stops])
    with recorded(4) as run:
        stops.stops = True
        thread.start()
        assert stops.inside.wait(WAIT_S)
        hooks = [
            nn_module.register_module_forward_hook(others_evaluation_ends, always_call=True),
            nn_module.register_module_forward_hook(lambda *_: None),
        ]
        with pytest.raises(ValueError, match="bad"):
            evaluate(bad)
        for hook in hooks:
            hook.remove()
    assert sorted(one.failed for one in run.evaluations) == [False, True]


def test_a_model_that_is_called_alone_and_as_a_part_ends_for_each_by_itself() -> None:
    """One thread watches for its end as the outermost call; to another it is one layer of many."""
    stops = Stops()
    whole = Model(lambda m, x: m.b(m.part(x)), part=stops)
    with recorded(2) as run:
        evaluate(nn.Linear(4, 4))
        with running(stops, lambda: evaluate(stops)):  # the second, without detail
            evaluate(nn.Linear(4, 4))  # nor has this
            evaluate(whole)
    trees = [one.tree() for one in run.evaluations]
    assert ("torch.evaluation", [("forward Model", [("forward part", ["forward part.linear"]), "forward b"])]) in trees


class Interrupted(nn.Linear):
    """A layer at which another thread's call comes in between, whenever it is asked for its mode."""

    between: Callable[[], object] | None = None

    @property
    def training(self) -> bool:
        between, self.between = self.between, None
        if between is not None:
            thread = threading.Thread(target=between)
            thread.start()
            thread.join(WAIT_S)
        return False

    @training.setter
    def training(self, value: bool) -> None:
        """Leave it as it is."""


def test_shapes_are_those_of_the_call_whatever_another_thread_calls_it_with() -> None:
    """What a layer's last call looked like is remembered, and another thread's may come in the midst of comparing."""
    layer = Interrupted(4, 4)
    with recorded() as run:
        evaluate(layer)
        layer.between = torch.inference_mode()(lambda: layer(ROW.repeat(3, 1)))
        evaluate(layer)
    shapes = [one.find("forward Interrupted").attributes["torch.output.shapes"] for one in run.evaluations]
    assert sorted(shapes) == [["1x4"], ["1x4"], ["3x4"]]


def test_an_exception_is_the_programs_own_while_others_come_and_go() -> None:
    """PyTorch reads a module's hooks when its forward has raised: another thread's call must not change them then."""

    def raises(model: Any, x: Tensor | None) -> Any:
        if x is None:
            raise ValueError("the program's own")
        return model.a(x)

    def hears(module: nn.Module, args: Any, output: Any) -> None:
        if output is None:
            other = threading.Thread(target=evaluate, args=(module,))
            other.start()
            other.join(WAIT_S)

    model = Model(raises)
    with recorded("off") as run:
        evaluate(model)
        model.register_forward_hook(hears, always_call=True)
        with pytest.raises(ValueError, match="the program's own"), torch.inference_mode():
            model(None)
        evaluate(model)
    assert len(run.evaluations) == 4
    assert len(model._forward_hooks) == 1


class Fails(nn.Module):
    """A layer that raises where its input says so."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() == 0:
            raise ValueError("the program's own")
        return x


@pytest.mark.usefixtures("quick_switches")
def test_threads_that_change_places_at_every_moment() -> None:
    """Hooks go in and out amid others' calls: each call is seen once, and what it raises is the program's own."""
    model = nn.Sequential(nn.ReLU6(), nn.Sequential(Fails()))
    raised: list[str] = []

    def work() -> None:
        for number in range(100):
            try:
                with torch.inference_mode():
                    model(ROW if number % 2 else -ROW)
            except Exception as error:  # noqa: BLE001  # whatever it is
                raised.append(type(error).__name__)

    with recorded("off") as run:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert Counter(raised) == {"ValueError": 400}
    assert len(run.evaluations) == 800
    assert sum("error.type" in one.attributes for one in run.evaluations) == 400


def test_a_step_that_another_thread_hands_over_is_of_the_one_that_ran_it() -> None:
    """A thread that has ended is closed by whoever comes next."""
    model = nn.Linear(4, 4)
    thread = threading.Thread(target=lambda: model(ROW).sum().backward())
    with recorded() as run:
        thread.start()
        thread.join()
    (step,) = run.steps
    assert step.attributes["thread.id"] == thread.ident
