"""Test that values of Lightning's Trainer are recorded, from either package."""

import pickle
from copy import deepcopy
from importlib import import_module
from pathlib import Path

import pytest
import torch
from support import PROGRAMS, commands
from support.framework_loops.logged_values import EPOCH, LOSS, RATE, STEP, all_of, of_steps
from support.framework_loops.model_and_data import BATCHES, EPOCHS, VALIDATION_BATCHES, loader
from torch import Tensor, nn

from torchotel import _semconv as names
from torchotel.integrations import lightning as events
from torchotel.integrations.lightning import LightningEvents
from torchotel.runs.rank_folders import open_ranks, rank_of
from torchotel.testing import capture

loop = pytest.importorskip("support.framework_loops.lightning_loop", reason="lightning is missing")
lightning = import_module("lightning.pytorch")
PACKAGES = ["lightning.pytorch", "pytorch_lightning"]


def _means(values: list[float], size: int) -> list[float]:
    return [sum(values[start : start + size]) / size for start in range(0, len(values), size)]


@pytest.mark.parametrize("package", PACKAGES)
def test_epoch_step_loss_rate_and_metrics_are_lightnings(package: str) -> None:
    """The loss is the module's, although Lightning divides it when it accumulates; means are recorded at their end."""
    module = loop.module(pytest.importorskip(package))
    with capture() as captured:
        trainer = loop.make(import_module(package), accumulate_grad_batches=2)
        trainer.fit(module, loader(BATCHES), loader(VALIDATION_BATCHES))
    losses = module.losses[1::2]  # of each step's last batch
    assert captured.handle.stats()["internal_errors"] == 0
    assert of_steps(captured, EPOCH, STEP, RATE) == [(number // 2, number + 1, 0.1) for number in range(4)]
    assert of_steps(captured, LOSS, "torch.log.train_loss_step") == [(loss, loss) for loss in losses]
    assert all_of(captured, "val_loss") == pytest.approx(_means(module.validation_losses, VALIDATION_BATCHES))
    assert all_of(captured, "train_loss_epoch") == pytest.approx(_means(module.losses, BATCHES))


def test_a_loss_that_a_validation_logs_is_none_of_a_step() -> None:
    """Results of validations and epochs get a prefix if their names are those of step values."""

    class Classifier(type(loop.module())):  # type: ignore[misc]  # Lightning's class
        def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
            self.net(**batch)
            self.log("loss", 99.0)
            self.log("epoch", 7.0)

        def on_train_epoch_end(self) -> None:
            self.log("lr", 5.0)

    with capture() as captured:
        loop.make().fit(Classifier(), loader(BATCHES), loader(VALIDATION_BATCHES))
    assert all(0 < loss < 99 for loss in all_of(captured, "loss") if isinstance(loss, float))
    assert set(all_of(captured, "epoch")) == set(range(EPOCHS))
    assert all_of(captured, "lr") == [0.1] * len(captured.steps)
    assert (set(all_of(captured, "val_loss")), set(all_of(captured, "val_epoch"))) == ({99.0}, {7.0})
    assert set(all_of(captured, "epoch_lr")) == {5.0}


def test_the_callback_can_be_pickled() -> None:
    """Strategies that start processes, such as ddp_spawn, pickle the Trainer with its callbacks."""
    with capture():
        (callback,) = events.lightning()
    assert type(pickle.loads(pickle.dumps(callback))) is type(callback)  # noqa: S301  # pickled in the same line


def test_a_copied_callback_has_the_names_that_it_published() -> None:
    """A value that was published for a step is not published again as an epoch's result after a copy of the Trainer."""
    with capture():
        trainer = loop.make(max_epochs=1)
        trainer.fit(loop.module(), loader(BATCHES), loader(VALIDATION_BATCHES))
    (callback,) = (callback for callback in trainer.callbacks if isinstance(callback, LightningEvents))
    assert callback._published_names >= {"train_loss_step", "val_loss"}
    assert deepcopy(callback)._published_names == callback._published_names
    loaded = pickle.loads(pickle.dumps(callback))  # noqa: S301  # pickled in the same line
    assert loaded._published_names == callback._published_names


def test_a_trainer_of_a_program_without_torchotel_has_no_callback_of_ours() -> None:
    """The entry point returns a callback only if torchotel is running when the Trainer is created."""
    before = [type(callback) for callback in loop.make().callbacks]
    with capture():
        trainer = loop.make()
        assert [type(callback) for callback in trainer.callbacks if isinstance(callback, LightningEvents)]
    assert [type(callback) for callback in loop.make().callbacks] == before
    trainer.fit(loop.module(), loader(BATCHES))
    assert trainer.global_step == EPOCHS * BATCHES


class Gan(lightning.LightningModule):  # type: ignore[name-defined, misc]  # untyped in some versions
    """Two networks that are trained in turns, with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch: dict[str, Tensor], _: int) -> None:
        of_generator, of_discriminator = self.optimizers()
        for optimizer, x in ((of_generator, self.generator(batch["x"])), (of_discriminator, batch["x"])):
            loss = self.discriminator(x).mean()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.generator, self.discriminator)]


def test_manual_optimization_with_two_optimizers_is_one_step_a_batch() -> None:
    """A step contains both networks' forwards, backwards and optimizer steps, although Lightning counts two steps."""
    with capture() as captured:
        loop.make(max_epochs=1).fit(Gan(), loader(BATCHES))
    turn = [names.SPAN_FORWARD, names.SPAN_BACKWARD, names.SPAN_OPTIMIZER]
    loads = names.SPAN_BETWEEN, names.SPAN_DATA
    phases = [[span.name for span in step.children if span.name not in loads] for step in captured.steps]
    assert phases == [turn + turn] * BATCHES
    assert of_steps(captured, EPOCH, STEP) == [(0, 2 * number + 2) for number in range(BATCHES)]
    assert captured.handle.stats()["internal_errors"] == 0


def test_another_interface_is_counted_and_nobody_is_disturbed(caplog: pytest.LogCaptureFixture) -> None:
    """If a Trainer lacks the attributes that are read, the fault is counted, and the training continues."""
    stranger = object()
    with capture() as captured:
        events = LightningEvents()
        events.on_train_epoch_start(stranger, stranger)
        events.on_train_batch_end(stranger, stranger, None, None, 0)
        events.on_validation_end(stranger, stranger)
        events.on_train_end(stranger, stranger)
    assert captured.handle.stats()["internal_errors"] == 5
    assert caplog.records == []


@pytest.mark.program
def test_ranks_that_lightning_starts(tmp_path: Path) -> None:
    """The first rank knows no other rank until the fit begins; all ranks agree on the run before they record."""
    program = str(PROGRAMS / "lightning_ranks_program.py")
    done = commands.python(program, cwd=tmp_path, PYTHONPATH=str(PROGRAMS.parent), **commands.SILENT)
    assert done.returncode == 0, done.stderr
    ranks = open_ranks(tmp_path / "run")
    assert [rank_of(rank) for rank in ranks] == [0, 1]
    first, second = ([line.trace_id for line in rank.records() if line.kind == "step"] for rank in ranks)
    assert first == second
    assert len(set(first)) == 2 * 64 // 2  # epochs, batches of both ranks
    exported = {str(line.request["resourceSpans"][0]["resource"]) for line in ranks[1].requests()}
    (resource,) = exported
    assert f"'{ranks[0].info['run_id']}'" in resource
