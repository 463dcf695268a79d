"""What is saved while torchotel watches: byte for byte what is saved without it."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchotel.testing import capture

both = pytest.mark.parametrize("detail", ["all", "off"])
ROWS = torch.arange(8.0).reshape(2, 4) / 8


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def train_and_save(folder: Path) -> dict[str, bytes]:
    """Take two steps, and save everything at every moment of the second; give the files."""
    model, scaler = net(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def save(moment: str) -> None:
        states = [one.state_dict() for one in (model, optimizer, schedule, scaler)]
        torch.save({"model": model, "optimizer": optimizer, "states": states}, folder / moment)

    for _ in range(2):
        optimizer.zero_grad()
        loss = model(ROWS).sum()
        save("after the forward")
        scaler.scale(loss).backward()
        save("after the backward")
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        save("at the end")
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@both
def test_files_are_the_same(detail: str, tmp_path: Path) -> None:
    """Whole models, optimizers and states go into the same bytes: they load where torchotel is not installed."""
    (plain := tmp_path / "plain").mkdir()
    (watched := tmp_path / "watched").mkdir()
    expected = train_and_save(plain)
    with capture(detail=detail):
        assert train_and_save(watched) == expected
    assert len(expected) == 3


class SavesItself(nn.Module):
    """Writes itself into a file in its forward, as a model does that keeps its best."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        """Save, then go on."""
        file = io.BytesIO()
        torch.save(self, file)
        self.__class__.saved = file.getvalue()
        return self.layer(x)

    saved = b""


@both
def test_a_model_that_saves_itself_in_its_forward(detail: str) -> None:
    """What stands on the model just then, to see its call end, names nothing of ours, and does nothing when loaded."""
    model = SavesItself()
    with capture(detail=detail) as captured:
        model(ROWS).sum().backward()
        assert b"torchotel" not in SavesItself.saved
        loaded = torch.load(io.BytesIO(SavesItself.saved), weights_only=False)
    assert len(captured.steps) + len(captured.evaluations) == 1
    assert torch.equal(loaded(ROWS), model(ROWS))
