"""Spans that a dataset opens while it is read: they stand in the step that the fetch opens, with either engine."""

import threading
from collections.abc import Iterator

import pytest
import torch
from opentelemetry import trace
from support.both_exports import ENGINES, looked
from support.recorded_training import rows, train
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Rows(Dataset[Tensor]):
    """A dataset that reads a database under a span."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self.tracer = tracer
        self.fails = False

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        with self.tracer.start_as_current_span(f"row {index}"):
            if self.fails:
                raise ValueError("no row")
            return torch.ones(4)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_span_opened_in_a_fetch_is_in_the_step_that_the_fetch_opens(engine: str) -> None:
    """Not in the step before, which has ended."""
    with looked(engine) as look:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in DataLoader(Rows(look.tracer)):
            model(batch).sum().backward()
            optimizer.step()
    assert [look.above(f"row {i}") for i in range(3)] == [[["torch.step"]]] * 3
    own = [next(names for names in look.traces.values() if f"row {i}" in names) for i in range(3)]
    assert all(sum(name.startswith("row") for name in names) == 1 for names in own)


@pytest.mark.parametrize("engine", ENGINES)
def test_accumulated_batches_are_one_tree(engine: str) -> None:
    """Ids that are given out in the second fetch are the first's step's."""
    with looked(engine) as look:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, batch in enumerate(DataLoader(Rows(look.tracer))):
            model(batch).sum().backward()
            if number % 3 == 2:
                optimizer.step()
    assert [look.above(f"row {i}") for i in range(3)] == [[["torch.step"]]] * 3
    assert len([names for names in look.traces.values() if "torch.step" in names]) == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_a_validation_between_accumulated_batches_changes_no_ids(engine: str) -> None:
    """What the next fetch opens goes on with the step."""
    with looked(engine) as look:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = iter(DataLoader(Rows(look.tracer)))
        for validate in (True, False):
            model(next(batches)).sum().backward()
            if validate:
                with torch.no_grad():
                    for batch in rows(1):
                        model(batch)
        optimizer.step()
    assert look.above("row 0") == look.above("row 1") == [["torch.step"]]
    assert len(look.above("torch.step")) == 1


class Cursor(IterableDataset[Tensor]):
    """A stream that opens a span at its end."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self.tracer = tracer

    def __iter__(self) -> Iterator[Tensor]:
        yield torch.ones(4)
        self.tracer.start_span("close cursor").end()


@pytest.mark.parametrize("engine", ENGINES)
def test_ids_that_were_given_out_are_always_there(engine: str) -> None:
    """A fetch that ends its iterator, fetches that no step follows, one that raises."""
    with looked(engine) as look:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in DataLoader(Rows(look.tracer)):
            pass
        for batch in DataLoader(Cursor(look.tracer)):
            model(batch).sum().backward()
            optimizer.step()
        broken = Rows(look.tracer)
        broken.fails = True
        with pytest.raises(ValueError, match="no row"):
            next(iter(DataLoader(broken)))
    assert look.above("row 0") == [["torch.data"]] * 2
    assert look.above("close cursor") == [["torch.data"]]
    assert look.above("torch.evaluation") == []


@pytest.mark.parametrize("engine", ENGINES)
def test_a_thread_that_only_fetches_has_no_step(engine: str) -> None:
    """What it opens stands for itself."""
    with looked(engine) as look:
        prefetch = threading.Thread(target=lambda: list(DataLoader(Rows(look.tracer))))
        prefetch.start()
        prefetch.join()
        train(1)
    assert [look.above(f"row {i}") for i in range(3)] == [[[]]] * 3
    assert len(look.above("torch.step")) == 1
