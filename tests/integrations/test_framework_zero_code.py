"""Test an unmodified program under `torchotel run`, which imports frameworks after torchotel has started."""

import json
from pathlib import Path

import pytest
from support import PROGRAMS, commands
from support.framework_loops.model_and_data import BATCHES, EPOCHS

pytestmark = pytest.mark.program


def test_epoch_step_and_loss_are_in_the_run_of_a_program_that_says_nothing(tmp_path: Path) -> None:
    """Steps of Hugging Face's Trainer, then of Lightning's, have epoch, step number and loss."""
    pytest.importorskip("transformers")
    pytest.importorskip("lightning")
    words = ("run", "--quiet", "--record", "run", str(PROGRAMS / "framework_loops" / "program.py"))
    done = commands.torchotel(*words, cwd=tmp_path, PYTHONPATH=str(PROGRAMS.parent))
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines())
    steps = [line["values"] for line in lines if line["kind"] == "step"]
    one_loop = [(number // BATCHES, number + 1) for number in range(EPOCHS * BATCHES)]
    assert [(step["epoch"], step["global_step"]) for step in steps] == one_loop * 2
    assert all("loss" in step for step in steps)
