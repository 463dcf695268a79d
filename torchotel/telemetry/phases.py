"""Where a step's time went."""

from collections.abc import Sequence

from torchotel._records import Phase, Unit

PHASES = ("data", "forward", "backward", "optimizer")


def enclosing(phases: Sequence[Phase]) -> list[int]:
    """For each phase the index of the innermost one that holds it, -1 for none."""
    found: list[int] = []
    for index, phase in enumerate(phases):
        best = -1
        for other_index, other in enumerate(phases):
            if other_index == index or not (other.start_ns <= phase.start_ns and phase.end_ns <= other.end_ns):
                continue
            if (other.start_ns, other.end_ns) == (phase.start_ns, phase.end_ns) and other_index > index:
                continue
            if best < 0 or other.start_ns > phases[best].start_ns:
                best = other_index
        found.append(best)
    return found


def phase_times_s(unit: Unit) -> dict[str, float]:
    """Return the self time of each kind of phase in seconds, and what is left of the step as "other".

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
    other_ns = max(0, unit.end_ns - unit.start_ns - sum(times_ns.values()))
    return {kind: ns / 1e9 for kind, ns in {**times_ns, "other": other_ns}.items()}
