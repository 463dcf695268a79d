"""Where a step's time went."""

from collections.abc import Sequence
from itertools import pairwise

from torchotel._records import Phase, Unit

PHASES = ("between", "data", "forward", "backward", "optimizer")


def enclosing(phases: Sequence[Phase]) -> list[int]:
    """For each phase the index of the innermost one that holds it, -1 for none.

    Where they follow one another none holds another, not even one that takes no time at its edge.
    """
    found = [-1] * len(phases)
    if all(before.end_ns <= phase.start_ns for before, phase in pairwise(phases)):
        return found  # one after the other, as in most steps
    open_phases: list[int] = []
    for index in sorted(range(len(phases)), key=lambda i: (phases[i].start_ns, -phases[i].end_ns)):
        # One that ends before this one does holds nothing that begins later and is not in this one too.
        while open_phases and phases[open_phases[-1]].end_ns < phases[index].end_ns:
            open_phases.pop()
        if open_phases:
            found[index] = open_phases[-1]
        open_phases.append(index)
    return found


def phase_times_s(unit: Unit) -> dict[str, float]:
    """Return the self time of each kind of phase in seconds, and what is left of the step as "other".

    The time of evaluations inside the step is in none.
    A closure's forward inside the optimizer's step counts as forward, an optimizer that steps inside the
    backward as optimizer.
    """
    times_ns = dict.fromkeys(PHASES, 0)
    parents = enclosing(unit.phases)
    for phase, parent in zip(unit.phases, parents, strict=True):
        length_ns = phase.end_ns - phase.start_ns
        times_ns[phase.kind] += length_ns
        if parent >= 0:
            times_ns[unit.phases[parent].kind] -= length_ns
    times_ns["other"] = max(0, unit.end_ns - unit.start_ns - unit.evaluated_ns - sum(times_ns.values()))
    return {kind: ns / 1e9 for kind, ns in times_ns.items()}
