"""How true the times of backward spans are."""

from itertools import pairwise
from statistics import median
from time import perf_counter_ns

import torch
from support.recorded_training import recorded
from torch import Tensor, nn


class Noted(nn.Module):
    """A layer of three operations that notes which autograd nodes it makes."""

    def __init__(self, numbers: list[tuple[int, int]]) -> None:
        super().__init__()
        self.layer, self.numbers = nn.Linear(256, 256), numbers

    def forward(self, x: Tensor) -> Tensor:
        first = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]  # has no public form
        y = torch.tanh(self.layer(x))
        self.numbers.append((first, torch.autograd._get_sequence_nr()))  # type: ignore[attr-defined]  # the same
        return y


def times_of_nodes(loss: Tensor, times: dict[int, list[int]]) -> None:
    """Note when each node of the graph runs, by its number."""
    assert loss.grad_fn is not None
    seen, todo = {loss.grad_fn}, [loss.grad_fn]
    while todo:
        node = todo.pop()
        stamps = times.setdefault(node._sequence_nr(), [])
        node.register_prehook(lambda _, stamps=stamps: stamps.append(perf_counter_ns()))
        node.register_hook(lambda *_, stamps=stamps: stamps.append(perf_counter_ns()))
        fresh = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= fresh
        todo += fresh


def test_backward_times_are_those_of_the_nodes() -> None:
    """Spans of leaves do not overlap, and each is as long as its nodes take: within a hundredth, by the median."""
    numbers: list[tuple[int, int]] = []
    model = nn.Sequential(*[Noted(numbers) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    truths = []
    with recorded() as run:
        for _ in range(9):
            numbers.clear()
            loss = model(torch.randn(256, 256)).sum()
            times: dict[int, list[int]] = {}
            times_of_nodes(loss, times)
            loss.backward()
            optimizer.step()
            stamps = [[t for n, ts in times.items() if first <= n < end for t in ts] for first, end in numbers]
            truths.append([max(own) - min(own) for own in stamps])
    ratios = []
    for step, truth in zip(run.steps, truths, strict=True):
        spans = [step.find(f"backward {index}") for index in range(4)]
        assert all(later.end_ns < earlier.start_ns for earlier, later in pairwise(spans))
        ratios += [(span.end_ns - span.start_ns) / true for span, true in zip(spans, truth, strict=True)]
    assert 0.99 < median(ratios) < 1.01
