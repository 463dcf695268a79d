"""Evaluations that nobody marks with `no_grad`, and fetches that fail: what a real program shows of them."""

from pathlib import Path

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from support.scraped_metrics import scrape, value
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torchotel
from torchotel.runs import open_run, summarise
from torchotel.testing import capture

ROWS = torch.ones(2, 4)


def test_a_request_without_no_grad_swallows_no_other() -> None:
    """Each request has its own layers, and an error is in the trace of the request that failed."""
    model, tracer = nn.Sequential(nn.Linear(4, 8), nn.ReLU()).eval(), TracerProvider().get_tracer("requests")
    with capture() as captured:
        with tracer.start_as_current_span("forgot") as forgot:
            model(ROWS)
        requests = []
        for rows in (ROWS, torch.ones(2, 5), ROWS):
            with tracer.start_as_current_span("right") as span, torch.inference_mode():
                requests.append(span.get_span_context())
                try:
                    model(rows)
                except RuntimeError as error:
                    assert "shapes" in str(error)  # noqa: PT017  # the loop goes on
        with tracer.start_as_current_span("train"):
            model(ROWS).sum().backward()
    evaluations = [root for root in captured.roots if root.name == "torch.evaluation"]
    first, *others = evaluations
    assert [link.span_id for link in first.links] == [forgot.get_span_context().span_id]
    assert [one.trace_id for one in others] == [request.trace_id for request in requests]
    assert [one.error is not None for one in evaluations] == [False, False, True, False]
    assert [len(one.find_all("forward 0")) for one in evaluations] == [1, 1, 1, 1]


def test_validation_in_evaluation_mode_is_no_part_of_a_step() -> None:
    """Neither `no_grad` nor a DataLoader says so; each batch is an evaluation, and the step has one forward."""
    model = nn.Sequential(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        model(ROWS).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with capture() as captured:
        train()
        train()
        model.eval()
        for _ in range(3):
            model(ROWS).sum().item()
        model.train()
        train()
    assert [len(step.find_all("forward 0")) for step in captured.steps] == [1, 1, 1]
    assert [len(evaluation.find_all("forward 0")) for evaluation in captured.evaluations] == [1, 1, 1]


@pytest.mark.parametrize("frozen", [False, True])
def test_training_in_evaluation_mode_stays_training(*, frozen: bool) -> None:
    """A step that forwards twice is whole from the second on: that a model trains in that mode shows at its backward.

    The first is whole, too, if a model in training mode runs before.
    """
    model, critic = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 1)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture() as captured:
        for epoch in range(4):
            model.train(frozen or not epoch)
            rows = model(ROWS)
            (critic(rows) - critic(model(ROWS)).square() if epoch else rows).sum().backward()
            optimizer.step()
    assert len(captured.steps) == 4
    assert [len(step.find_all("forward 0")) for step in captured.steps] == [1, 4 if frozen else 2, 4, 4]


def test_a_fetched_batch_is_one_evaluation() -> None:
    """Also if the model runs on it twice, in evaluation mode and with gradients on."""
    model = nn.Linear(4, 1)
    with capture() as captured:
        model(ROWS).sum().backward()
        torch.optim.SGD(model.parameters()).step()
        model.eval()
        for (rows,) in DataLoader(TensorDataset(ROWS)):
            model(rows) + model(rows)
    assert len(captured.evaluations) == len(ROWS)


class Rows(Dataset[torch.Tensor]):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 4:
            raise KeyError(f"row {index}")
        return torch.ones(4)

    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_raises_is_seen(workers: int) -> None:
    """As a failed `torch.data`, which a search for the error's type finds; the steps before it are whole."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for rows in DataLoader(Rows(), batch_size=2, num_workers=workers):
            model(rows).sum().backward()
            optimizer.step()

    with capture() as captured, pytest.raises(KeyError, match="row 4"):
        train()
    (failed,) = [root for root in captured.roots if root.error is not None]
    assert failed.name == "torch.data"
    assert failed.attributes["error.type"] == "KeyError"
    assert failed.attributes["torch.kept.reason"] == "error"
    assert len(captured.steps) == 2
    assert all(step.error is None for step in captured.steps)


def test_metric_and_summary_count_the_same_evaluations(tmp_path: Path) -> None:
    """A training step whose forward failed is no evaluation in them and in stats; a failed request is one in all."""
    model = nn.Linear(4, 1)
    with torchotel.instrument(record=tmp_path / "run", traces_exporter="none", prometheus_port=0) as handle:
        model(ROWS).sum().backward()
        torch.optim.SGD(model.parameters()).step()
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(2, 5))
        with torch.no_grad():
            model(ROWS)
            with pytest.raises(RuntimeError, match="shapes"):
                model(torch.ones(2, 5))
        assert handle.flush()
        series = scrape(handle.prometheus_port).series
    run = open_run(tmp_path / "run")
    summary = summarise(run.records(), run.spans())
    assert summary.evaluations == value(series, "torch_evaluations_total") == handle.stats()["evaluations"] == 2
    assert summary.evaluation_s == pytest.approx(value(series, "torch_evaluation_time_seconds_total"))


def test_validation_without_gradients_after_one_with_them() -> None:
    """Each call is an evaluation, in either form, and none is part of the one before."""
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with capture(detail="off") as captured:
        for _ in range(2):
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        net.eval()
        for _ in range(2):
            net(torch.ones(2, 4))
        with torch.no_grad():
            for _ in range(3):
                net(torch.ones(2, 4))
    assert captured.handle.stats()["evaluations"] == 5
    assert captured.handle.stats()["steps"] == 2
