"""Time between the end of a step and the first event of the next: a hand-written loader, validation, a pause."""

import json
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from opentelemetry.trace import get_current_span
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchotel
from torchotel import _semconv as names
from torchotel.runs import open_run, render, summarise
from torchotel.testing import capture

LOAD_S = 0.03


def load() -> Tensor:
    """Make a batch as slowly as a loader that is not a DataLoader."""
    time.sleep(LOAD_S)
    return torch.randn(4, 4)


class Training:
    """A model and its optimizer."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)

    def step(self, batch: Tensor) -> None:
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_a_hand_written_loader_is_part_of_the_next_step() -> None:
    """The span `torch.between` begins with the step, and the step lasts as long as the loop takes for it."""
    training = Training()
    with capture() as captured:
        for _ in range(3):
            training.step(load())
    first, *later = captured.steps
    assert first.find_all(names.SPAN_BETWEEN) == []
    for step in later:
        between = step.find(names.SPAN_BETWEEN)
        assert between is step.children[0]
        assert between.start_ns == step.start_ns
        assert LOAD_S <= between.duration_s < step.duration_s
    assert second_starts_where_first_ended(first, later[0])


def second_starts_where_first_ended(
    first: torchotel.testing.CapturedSpan, second: torchotel.testing.CapturedSpan
) -> bool:
    return abs(second.start_ns - first.end_ns) < 10_000  # spans side by side are kept a microsecond apart


def test_rates_are_by_the_wall_clock(tmp_path: Path) -> None:
    """Seconds of all steps together are the seconds of the loop."""
    training = Training()
    with torchotel.instrument(record=tmp_path / "run", traces_exporter="none", metrics_exporter="none"):
        for _ in range(5):
            training.step(load())
            torchotel.log(samples=4)
    run = open_run(tmp_path / "run")
    units = list(run.records())
    summary = summarise(units, run.spans())
    assert summary.samples_per_second is not None
    assert summary.steps_per_second is not None
    assert summary.samples_per_second == pytest.approx(4 * summary.steps_per_second)
    assert sum(unit.duration_s for unit in units) == pytest.approx(5 / summary.steps_per_second, rel=0.01)
    between = next(phase for phase in summary.phases if phase.name == "between")
    assert between.p50_s >= LOAD_S
    assert "between" in render(summary, run.info)


def test_validation_is_no_time_between_steps() -> None:
    """Its batches are evaluations; what the program does beside them is time between steps."""
    training = Training()
    with capture() as captured:
        training.step(torch.randn(4, 4))
        with torch.no_grad():
            for _ in range(3):
                handle = training.model.register_forward_pre_hook(lambda *_: time.sleep(LOAD_S))
                training.model(torch.randn(4, 4))
                handle.remove()
        training.step(torch.randn(4, 4))
    assert len(captured.evaluations) == 3
    assert sum(evaluation.duration_s for evaluation in captured.evaluations) >= 3 * LOAD_S
    first, second = captured.steps
    evaluated_s = sum(evaluation.duration_s for evaluation in captured.evaluations)
    gap_s = (second.find(names.SPAN_FORWARD).start_ns - first.end_ns) / 1e9
    assert second.find(names.SPAN_BETWEEN).duration_s == pytest.approx(gap_s - evaluated_s, abs=1e-5)


def test_a_training_step_whose_forward_failed_is_time_between_steps() -> None:
    """It is no evaluation, so its time is in the step that follows."""
    training = Training()
    with capture() as captured:
        training.step(torch.randn(4, 4))
        handle = training.model.register_forward_pre_hook(lambda *_: time.sleep(LOAD_S))
        with pytest.raises(RuntimeError, match="shapes"):
            training.step(torch.randn(4, 5))
        handle.remove()
        training.step(torch.randn(4, 4))
    _, second = captured.steps
    assert second.find(names.SPAN_BETWEEN).duration_s >= LOAD_S


@pytest.mark.parametrize("grad", [True, False])
def test_validation_amid_a_step_is_in_none_of_its_phases(tmp_path: Path, *, grad: bool) -> None:
    """Gradients accumulate over two batches, with a validation between: its time is that of evaluations only."""
    training = Training()

    def validate() -> None:
        training.model.eval()
        handle = training.model.register_forward_pre_hook(lambda *_: time.sleep(LOAD_S))
        for (rows,) in DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4):
            training.model(rows)
        handle.remove()
        training.model.train()

    with torchotel.instrument(record=tmp_path / "run", traces_exporter="none", metrics_exporter="none"):
        training.step(torch.randn(4, 4))
        training.model(torch.randn(4, 4)).sum().backward()
        with torch.set_grad_enabled(grad):
            validate()
        training.step(torch.randn(4, 4))
    units = list(open_run(tmp_path / "run").records())
    steps = [unit for unit in units if unit.kind == "step"]
    evaluated_s = sum(unit.duration_s for unit in units if unit.kind == "evaluation")
    assert len(steps) == 2
    assert evaluated_s >= 2 * LOAD_S
    assert steps[1].duration_s == pytest.approx(sum(steps[1].phases.values()) + evaluated_s)


def test_asking_for_the_current_span_makes_no_step_longer() -> None:
    """Every log record does, where the program links its logs to traces."""
    training = Training()
    with capture() as captured:
        for _ in range(3):
            training.step(load())
            time.sleep(LOAD_S)
            assert get_current_span().get_span_context().is_valid
    for step, following in pairwise(captured.steps):
        assert step.end_ns == step.find(names.SPAN_OPTIMIZER).end_ns
        assert step.end_ns <= following.start_ns + 1_000
        assert following.find(names.SPAN_BETWEEN).duration_s >= 2 * LOAD_S


def test_a_pause_is_a_gap_and_no_step_time(tmp_path: Path) -> None:
    """The step after it says how long, and the metric counts it."""
    training = Training()
    with torchotel.instrument(record=tmp_path / "run", traces_exporter="none", metrics_exporter="none") as handle:
        training.step(torch.randn(4, 4))
        handle.pause()
        time.sleep(LOAD_S)
        handle.resume()
        training.step(torch.randn(4, 4))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first, second = (line for line in lines if line["kind"] == "step")
    assert "gap_s" not in first
    assert second["gap_s"] >= LOAD_S
    assert second["phases"]["between"] == 0
    (root,) = [span for span in open_run(tmp_path / "run").spans() if span.attributes.get("torch.step.number") == 1
               and span.name == names.SPAN_STEP]  # fmt: skip
    assert root.attributes[names.STEP_GAP] == pytest.approx(second["gap_s"])
