"""Steps that the program says itself: `step`."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
import torch
from support.recorded_training import recorded, rows
from support.small_training import Loop

import torchotel


def fail(loop: Loop) -> None:
    """Train a step and raise."""
    loop.step()
    raise KeyError("gone")


def test_an_explicit_step_is_what_its_block_holds() -> None:
    """It takes in the fetch just before it, several optimizer steps, an evaluation; what is outside is as ever."""
    loop = Loop()
    with recorded() as run:
        for number, batch in enumerate(rows(2)):
            with torchotel.step(epoch=number):
                loop.step(batch)
                loop.step(batch)
                with torch.no_grad():
                    loop.model(batch)
        with torch.no_grad():
            loop.model(torch.ones(2, 4))
        loop.step()
    phases = ["torch.forward", "torch.backward", "torch.optimizer.step"]
    inside = ["torch.data", *phases, *phases, "torch.forward"]
    seen = [[child.name for child in step.children] for step in run.steps]
    assert seen == [
        ["torch.data", *inside],  # the first fetch makes the iterator
        ["torch.between", *inside],
        ["torch.between", *phases],
    ]
    assert [step.attributes.get("torch.epoch") for step in run.steps] == [0, 1, None]
    assert len(run.evaluations) == 1


def test_explicit_steps_that_hold_little() -> None:
    """Nothing at all, a forward alone, one in another; each block is one step."""
    loop = Loop()
    with recorded() as run:
        with torchotel.step():
            pass
        with torchotel.step():
            loop.model(torch.ones(2, 4))
        with torchotel.step(), torchotel.step(epoch=2):
            loop.step()
        loop.step()
    assert [len(step.children) for step in run.steps] == [0, 2, 4, 4]
    assert run.steps[2].attributes["torch.epoch"] == 2
    assert run.evaluations == []


def test_a_function_may_be_an_explicit_step() -> None:
    """As a decorator."""
    loop = Loop()

    @torchotel.step(phase="warm")
    def twice() -> None:
        loop.step()
        loop.step()

    with recorded() as run:
        twice()
        twice()
    assert [len(step.children) for step in run.steps] == [6, 7]
    assert run.steps[1].attributes["torch.log.phase"] == "warm"


async def _coroutine() -> None: ...


def _generator() -> Iterator[None]:
    yield


async def _async_generator() -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize("function", [_coroutine, _generator, _async_generator])
def test_a_function_whose_body_runs_after_its_call_is_not_decorated(
    function: Callable[[], Awaitable[None] | Iterator[None] | AsyncIterator[None]], caplog: pytest.LogCaptureFixture
) -> None:
    """Its call runs nothing of its body, so a step around the call would be empty; a warning says so once."""
    assert torchotel.step()(function) is function
    assert torchotel.step()(function) is function
    (message,) = [record.getMessage() for record in caplog.records if record.name == "torchotel"]
    assert function.__qualname__ in message
    assert "with torchotel.step():" in message


def test_an_exception_fails_its_explicit_step() -> None:
    """It passes on as it is."""
    loop = Loop()
    with recorded() as run:
        with pytest.raises(KeyError, match="gone"), torchotel.step():
            fail(loop)
        loop.step()
    failed, following = run.steps
    assert failed.failed
    assert failed.attributes["error.type"] == "KeyError"
    assert failed.attributes["torch.kept.reason"] == "error"
    assert not following.failed


def test_flush_inside_an_explicit_step_leaves_it_open() -> None:
    """It is one step all the same."""
    loop = Loop()
    with recorded() as run, torchotel.step():
        loop.step()
        run.handle.flush()
        loop.step()
    assert len(run.steps) == 1
    assert len(run.steps[0].children) == 6
