"""Test that values of Hugging Face's Trainer are recorded."""

import logging
from importlib import import_module
from typing import Any

import pytest
import torch
from support.framework_loops.logged_values import EPOCH, LOSS, RATE, STEP, all_of, of_steps
from support.framework_loops.model_and_data import Setting
from torch import Tensor

import torchotel
from torchotel import _semconv as names
from torchotel.testing import capture

transformers = pytest.importorskip("transformers", reason="transformers is missing")
loop = pytest.importorskip("support.framework_loops.trainer_loop", reason="transformers' Trainer can't be had")


def _history(trainer: Any, name: str) -> list[Any]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_epoch_step_loss_and_rate_are_the_trainers() -> None:
    """Values equal the Trainer's history, with the epoch as of the step; the history is as without torchotel."""
    alone = loop.make(Setting(accumulate=2))
    alone.train()
    torch.manual_seed(0)
    with capture() as captured:
        trainer = loop.make(Setting(accumulate=2))
        trainer.train()
    losses, rates = _history(trainer, "loss"), _history(trainer, "learning_rate")
    assert losses == _history(alone, "loss")
    assert of_steps(captured, EPOCH, STEP, LOSS, RATE) == [
        (number // 2, number + 1, losses[number], rates[number]) for number in range(4)
    ]
    assert all_of(captured, "grad_norm") == _history(trainer, "grad_norm")
    assert all_of(captured, "eval_loss") == _history(trainer, "eval_loss")


def test_a_loss_is_told_when_the_trainer_logs_it() -> None:
    """The loss is a mean over the steps since the last log; epoch and step number are recorded on each step."""
    with capture() as captured:
        trainer = loop.make(Setting(), logging_steps=4)
        trainer.train()
    first, second = _history(trainer, "loss")
    assert of_steps(captured, LOSS) == [*[(None,)] * 3, (first,), *[(None,)] * 3, (second,)]
    assert of_steps(captured, EPOCH, STEP) == [(number // 4, number + 1) for number in range(8)]


def test_what_the_program_logs_itself_holds() -> None:
    """A loss that the program logs on each step is not replaced by the Trainer's mean."""

    class Speaking(transformers.Trainer):  # type: ignore[name-defined, misc]  # untyped in some versions
        def compute_loss(self, *args: Any, **kwargs: Any) -> Tensor:
            torchotel.log(loss=7.0)
            loss: Tensor = super().compute_loss(*args, **kwargs)
            return loss

    with capture() as captured:
        trainer = loop.make(Setting(), max_steps=2)
        trainer.__class__ = Speaking
        trainer.train()
    assert of_steps(captured, LOSS, STEP) == [(7.0, 1), (7.0, 2)]


def test_nothing_is_left_in_transformers() -> None:
    """Trainers get the callback only if torchotel is running, and continue after it has stopped."""
    before = list(transformers.trainer.DEFAULT_CALLBACKS)
    with capture():
        trainer = loop.make(Setting(), max_steps=1)
    after = loop.make(Setting(), max_steps=1)
    ours = set(trainer.callback_handler.callback_list.split()) - set(after.callback_handler.callback_list.split())
    assert ours == {"TorchotelCallback"}
    assert before == transformers.trainer.DEFAULT_CALLBACKS
    trainer.train()
    assert trainer.state.global_step == 1


def test_another_interface_is_counted_and_nobody_is_disturbed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If transformers has no list of default callbacks, steps are still found."""
    trainer = loop.make(Setting(), max_steps=2)
    monkeypatch.delattr(transformers.trainer, "DEFAULT_CALLBACKS")
    with caplog.at_level(logging.INFO, "torchotel"), capture() as captured:
        trainer.train()
    assert captured.handle.stats()["internal_errors"] == 1
    assert of_steps(captured, EPOCH, RATE) == [(None, 0.1), (None, 0.05)]
    assert caplog.records == []


def test_a_state_that_knows_no_epoch_disturbs_nobody() -> None:
    """A state without an epoch or a step, as other versions may have, does not disturb the training."""
    ours = import_module("torchotel.integrations.transformers").TorchotelCallback()
    with capture() as captured:
        ours.on_step_begin(None, object(), None)
        ours.on_step_end(None, object(), None)
    assert captured.handle.stats()["internal_errors"] == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_is_recomputation_in_the_backward(reentrant: bool) -> None:  # noqa: FBT001  # a test parameter
    """The calls inside a layer are repeated in the backward, marked as recomputed; steps are the Trainer's."""
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
        )
    )
    words = [{"input_ids": torch.arange(4), "labels": number % 2} for number in range(4)]
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    with capture() as captured:
        loop.make(Setting(), model, words, max_steps=2, eval_strategy="no", **checkpointing).train()
    assert captured.handle.stats()["internal_errors"] == 0
    assert of_steps(captured, STEP) == [(1,), (2,)]
    for step in captured.steps:
        first, second = step.find_all("forward bert.encoder.layer.0.attention")
        assert [names.RECOMPUTE in span.attributes for span in (first, second)] == [False, True]
        assert second in list(step.find_all(names.SPAN_BACKWARD)[0].walk())
