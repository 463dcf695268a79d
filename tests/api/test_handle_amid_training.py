"""What a program asks of the handle while it trains: `detail(steps=)`, `pause` and `resume`."""

import threading

import pytest
import torch
from support.recorded_training import recorded
from support.small_training import Loop

import torchotel
from torchotel import testing
from torchotel._records import Phase, StepRecord


def test_the_next_steps_in_detail_on_request() -> None:
    """Whatever the setting, from another thread too; then the setting holds again."""
    loop = Loop()
    with recorded("off") as run:
        loop.step()
        asks = threading.Thread(target=run.handle.detail, kwargs={"steps": 2})
        asks.start()
        asks.join()
        for _ in range(4):
            loop.step()
    detailed = [bool(step.find_all("forward Linear")) for step in run.steps]
    assert detailed == [False, True, True, False, False]


def test_every_part_of_a_step_is_in_detail_or_none() -> None:
    """A backward before the forward opens the step, without a loader: both belong to the next one."""
    loop = Loop()
    with recorded(3) as run:
        for _ in range(6):
            torch.ones(1, requires_grad=True).sum().backward()
            loop.step()
    assert [bool(step.find_all("forward Linear")) for step in run.steps] == [True, False, False] * 2


def test_a_bad_number_of_steps_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """The handle raises nothing."""
    with recorded("off") as run:
        run.handle.detail(steps=0)
        Loop().step()
    assert "whole number" in caplog.text
    assert not run.steps[0].find_all("forward Linear")


def test_pause_takes_the_hooks_out_and_resume_puts_them_back() -> None:
    """What was open is handed over; steps in between are not seen, and numbers go on."""
    loop = Loop()
    with recorded() as run:
        loop.step()
        run.handle.pause()
        run.handle.pause()
        assert not torch.nn.modules.module._global_forward_pre_hooks
        loop.step()
        torchotel.log(loss=1.0)
        run.handle.resume()
        run.handle.resume()
        loop.step()
        loop.step()
    assert [step.attributes["torch.step.number"] for step in run.steps] == [0, 1, 2]
    assert all(step.find_all("backward Linear") for step in run.steps)
    assert not any("torch.loss" in step.attributes for step in run.steps)
    run.handle.pause()
    run.handle.resume()
    run.handle.detail(steps=3)
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_a_pause_amid_a_backward_hands_over_what_changes_no_more() -> None:
    """The backward goes on; what was recorded of it until then is the worker's."""
    loop, seen = Loop(), list[list[tuple[Phase, ...]]]()
    with testing.capture() as captured:
        loss = loop.model(torch.ones(2, 4)).sum()

        def pause(_: torch.Tensor) -> None:
            captured.handle.pause()
            seen.append([tuple(unit.phases) for unit in captured.records if isinstance(unit, StepRecord)])
            captured.handle.resume()

        loss.register_hook(pause)
        loss.backward()
        loop.optimizer.step()
        loop.step()
    ((phases,),) = seen
    (first, *_) = [unit for unit in captured.records if isinstance(unit, StepRecord)]
    assert tuple(first.phases) == phases
    assert [phase.kind for phase in phases] == ["forward", "backward"]
