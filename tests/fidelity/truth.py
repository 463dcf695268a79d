"""How true the times are: those of spans beside what timers of the tests' own say of the same nodes and forwards.

The timers around a forward stand inside of torchotel's hooks: what PyTorch takes from hooks to the forward is in both.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from statistics import median
from typing import NamedTuple

from torch import nn

from fidelity.counted import Counted, counting
from fidelity.subjects import Subject
from fidelity.timers import Interval, Nodes, timed_leaves
from fidelity.training import train
from torchotel import _semconv as names
from torchotel._records import StepRecord
from torchotel.testing import Captured, CapturedSpan, capture

MOST_OFF = 0.005
"""Share of the truth that times may be off by."""
MOST_OFF_NS = 2_000
"""What each end may be, where that is more."""
WORST_END_US = 100
"""Where no other program runs."""
MORE_STEPS = (3, 3, 6, 12, 24)
"""Steps of each attempt: few are enough where there are many leaves and nothing else runs."""


class Leaf(NamedTuple):
    """One run of a module that calls no other: its true time, and its span's."""

    true: Interval
    seen: Interval

    @property
    def both_ns(self) -> int:
        """Give what both times last together: longer where another program ran meanwhile."""
        return self.true.duration_ns + self.seen.duration_ns

    @property
    def share_of_bound(self) -> float:
        """Give what the span's time is off by, as a share of what it may be."""
        off_ns = abs(self.seen.duration_ns - self.true.duration_ns)
        return off_ns / _bound_ns(self.true.duration_ns, ends=2)


class Errors:
    """How spans of leaves differ from the truth.

    Args:
        leaves: Each as it was when it was quickest.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.leaves = leaves
        self.true_ns = sum(leaf.true.duration_ns for leaf in leaves)
        self.seen_ns = sum(leaf.seen.duration_ns for leaf in leaves)

    @property
    def ratio(self) -> float:
        """Give the sum of the spans over the truth."""
        return self.seen_ns / self.true_ns

    @property
    def end_us(self) -> float:
        """Give what the sum is off by, for each end, in microseconds."""
        return abs(self.seen_ns - self.true_ns) / len(self.leaves) / 2e3

    @property
    def worst_us(self) -> float:
        """Give the worst error of an end, in microseconds."""
        offs = [abs(seen - true) for leaf in self.leaves for true, seen in zip(leaf.true, leaf.seen, strict=True)]
        return max(offs) / 1e3

    def faults(self, *, alone: bool) -> list[str]:
        """Say where the sum, half of the leaves, or alone any end, is further off than it may be."""
        found = []
        if alone and self.worst_us > WORST_END_US:
            found.append(f"an end is {self.worst_us:.0f} µs off")
        if abs(self.seen_ns - self.true_ns) > _bound_ns(self.true_ns, ends=2 * len(self.leaves)):
            found.append(f"the sum of times is {self.ratio:.4f} of the true one, {self.end_us:.1f} µs off for each end")
        if median(leaf.share_of_bound for leaf in self.leaves) > 1:
            found.append("most times are further off than they may be")
        return found


def _bound_ns(true_ns: int, *, ends: int) -> float:
    """Give how far times may be off."""
    return max(MOST_OFF * true_ns, MOST_OFF_NS * ends)


class Truth(NamedTuple):
    """Both directions; None where no leaf ran."""

    forward: Errors | None
    backward: Errors | None

    def faults(self, *, alone: bool) -> list[str]:
        """Say where times of either are further off than they may be."""
        return [
            f"{direction}: {fault}"
            for direction, errors in self._asdict().items()
            if errors is not None
            for fault in errors.faults(alone=alone)
        ]


def measure(subject: Subject, steps: int) -> Truth:
    """Train a subject with all detail, and compare its leaves with the truth, each in the step where it was quickest.

    Where other programs run, they take the others' time. A step before these loads code.
    """
    nodes = Nodes()
    with timed_leaves() as leaves, capture(max_spans=None) as captured, counting(nodes.watch) as counted:
        train(replace(subject, steps=1 + steps), counted.built)
    quickest: dict[str, dict[object, Leaf]] = {"forward": {}, "backward": {}}
    for direction, key, leaf in _compared(captured, counted, nodes, leaves.intervals()):
        known = quickest[direction].get(key)
        if known is None or leaf.both_ns < known.both_ns:
            quickest[direction][key] = leaf
    return Truth(*(Errors([*found.values()]) if found else None for found in quickest.values()))


def measure_undisturbed(subject: Subject, *, alone: bool = False) -> Truth:
    """Measure until both are true, ever more steps; where they never are, it is not other programs' doing.

    Args:
        subject: What is trained.
        alone: Whether no other program runs: then each single end is judged too.
    """
    for steps in MORE_STEPS:
        truth = measure(subject, steps)
        if not truth.faults(alone=alone):
            break
    return truth


def _compared(
    captured: Captured, counted: Counted, nodes: Nodes, forwards: Mapping[nn.Module, list[Interval]]
) -> Iterator[tuple[str, object, Leaf]]:
    """Yield the leaves of all steps but the first, by direction and by what is the same in each step."""
    units = [record for record in captured.records if isinstance(record, StepRecord) and record.kind == "step"]
    calls, left = counted.calls, {module: list(times) for module, times in forwards.items()}
    for unit, root in reversed([*zip(units, captured.steps, strict=True)][1:]):
        ahead, behind, place = _spans_of(root), _by_key(root), count()
        calls, own = calls[: -len(ahead)], calls[-len(ahead) :]
        for call, span in zip(reversed(own), reversed(ahead), strict=True):
            if call.children:
                continue
            key = *_key(span), next(place) if names.RECOMPUTE in span.attributes else 0
            if left.get(call.module) and names.COMPILED not in span.attributes:  # hooks run inside a region, if at all
                yield "forward", key, Leaf(left[call.module].pop(), _interval(span, unit))
            true = nodes.of(call)
            if true is not None:
                yield "backward", key, Leaf(true, _interval(behind[_key(span)].pop(), unit))


def _spans_of(root: CapturedSpan, direction: str = "forward") -> list[CapturedSpan]:
    found = [span for span in root.walk() if span.attributes.get(names.DIRECTION) == direction]
    return sorted(found, key=lambda span: span.start_ns)


def _by_key(root: CapturedSpan) -> dict[object, list[CapturedSpan]]:
    """Collect backward spans: several of a key where a checkpoint runs a module again more than once."""
    found: dict[object, list[CapturedSpan]] = {}
    for span in _spans_of(root, "backward"):
        found.setdefault(_key(span), []).append(span)
    return found


def _interval(span: CapturedSpan, unit: StepRecord) -> Interval:
    return Interval(span.start_ns - unit.unix_offset_ns, span.end_ns - unit.unix_offset_ns)


def _key(span: CapturedSpan) -> tuple[object, ...]:
    return tuple(span.attributes.get(name) for name in (names.MODEL, names.MODULE_PATH, names.CALL_INDEX))
