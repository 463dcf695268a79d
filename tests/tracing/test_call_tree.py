"""Which phase holds which, and what they took."""

import random
import time

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


def test_a_step_of_very_many_phases() -> None:
    """One optimizer for each of 20,000 parameters, stepping inside the backward, is no matter of seconds."""
    phases = [Phase("backward", 0, 100_000), *(Phase("optimizer", 4 * n, 4 * n + 2) for n in range(20_000))]
    begun_s = time.perf_counter()
    assert enclosing(phases) == [-1, *[0] * 20_000]
    assert time.perf_counter() - begun_s < 1
