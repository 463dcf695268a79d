"""Which phase holds which, and what they took."""

import random
from collections.abc import Iterable
from typing import Any

from torchotel._records import Phase, enclosing


def test_innermost_phase_that_holds() -> None:
    """Of all phases that hold one, the one that begins last is its parent; of two alike the first holds the second."""
    chance = random.Random(0)
    for _ in range(200):
        bounds = [sorted(chance.sample(range(30), 2)) for _ in range(12)]
        phases = [Phase("backward", start, end) for start, end in bounds]
        for index, parent in enumerate(enclosing(phases)):
            inner = phases[index]
            holding = [
                other.start_ns
                for place, other in enumerate(phases)
                if other.start_ns <= inner.start_ns
                and inner.end_ns <= other.end_ns
                and ((other.start_ns, other.end_ns) != (inner.start_ns, inner.end_ns) or place < index)
            ]
            assert (phases[parent].start_ns if parent >= 0 else None) == max(holding, default=None)


class CountedReads(list[Phase]):
    """Counts how often one of its phases is looked up."""

    def __init__(self, phases: Iterable[Phase]) -> None:
        super().__init__(phases)
        self.reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


def test_a_step_of_very_many_phases() -> None:
    """With one optimizer for each of 2,000 parameters, stepping inside the backward, the work is linear."""
    optimizers = [Phase("optimizer", 4 * n, 4 * n + 2) for n in range(2_000)]
    phases = CountedReads([Phase("backward", 0, 10_000), *optimizers])
    assert enclosing(phases) == [-1, *[0] * 2_000]
    assert phases.reads < 10 * len(phases)
