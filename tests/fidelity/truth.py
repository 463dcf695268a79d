"""How true the times are: every autograd node and every leaf's forward timed by hooks of this file's own.

Those around a forward stand inside of torchotel's: what PyTorch itself takes from its hooks to the forward is in both.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import median
from time import perf_counter_ns
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import register_module_forward_hook

from fidelity.counted import Call, Counted, counting, nodes_of
from fidelity.subjects import Subject
from fidelity.training import train
from torchotel import _names as names
from torchotel._records import Unit
from torchotel.testing import Captured, CapturedSpan, capture

MOST_OFF = 0.005
"""Share of the truth that times may be off by."""
MOST_OFF_NS = 2_000
"""What each end may be, where that is more."""
WORST_END_US = 100
"""Where no other program runs."""


class Interval(NamedTuple):
    """When something ran, in nanoseconds of one clock."""

    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """Give how long it lasted."""
        return self.end_ns - self.start_ns


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

    @property
    def faults(self) -> list[str]:
        """Say where the sum, or half of the leaves, is further off than it may be."""
        found = []
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

    @property
    def faults(self) -> list[str]:
        """Say where times of either are further off than they may be."""
        return [
            f"{direction}: {fault}"
            for direction, errors in self._asdict().items()
            if errors is not None
            for fault in errors.faults
        ]


@dataclass
class _Nodes:
    """When nodes of the graph ran."""

    stamps: dict[int, list[int]] = field(default_factory=dict)
    """When each began and ended, by its number."""

    def watch(self, roots: Sequence[Tensor]) -> None:
        for node in {node for root in roots for node in nodes_of(root)}:
            stamps = self.stamps.setdefault(node._sequence_nr(), [])
            node.register_prehook(lambda _, stamps=stamps: stamps.append(perf_counter_ns()))
            node.register_hook(lambda *_, stamps=stamps: stamps.append(perf_counter_ns()))

    def of(self, call: Call) -> Interval | None:
        own = [t for number in range(call.first, call.last) for t in self.stamps.get(number, ())]
        return Interval(min(own), max(own)) if own else None


def measure(subject: Subject, steps: int = 3) -> Truth:
    """Train a subject with all detail, and compare its leaves with the truth, each in the step where it was quickest.

    Where other programs run, they take the others' time. A step before these loads code.
    """
    nodes = _Nodes()
    # Hooks run in the order in which they were put in: the timer's after a forward, before ours.
    with _timed_leaves() as log, capture(max_spans=None) as captured, counting(nodes.watch) as counted:
        train(replace(subject, steps=1 + steps), counted.built)
    quickest: dict[str, dict[object, Leaf]] = {"forward": {}, "backward": {}}
    for direction, key, leaf in _compared(captured, counted, nodes, _intervals(log)):
        known = quickest[direction].get(key)
        if known is None or leaf.both_ns < known.both_ns:
            quickest[direction][key] = leaf
    return Truth(*(Errors([*leaves.values()]) if leaves else None for leaves in quickest.values()))


def measure_undisturbed(subject: Subject, times: int = 5) -> Truth:
    """Measure until both are true; where they never are, it is not other programs' doing."""
    for _ in range(times - 1):
        truth = measure(subject)
        if not truth.faults:
            return truth
    return measure(subject)


@contextmanager
def _timed_leaves() -> Iterator[list[tuple[nn.Module, bool, int]]]:
    """Log when forwards of modules that hold no others begin (True) and end: the last hook before, the first after."""
    log: list[tuple[nn.Module, bool, int]] = []
    hooked: set[nn.Module] = set()
    original: Callable[..., Any] = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        traced = torch.compiler.is_compiling()  # for export
        if not traced and module not in hooked and not any(module.children()):
            hooked.add(module)
            module.register_forward_pre_hook(begins, prepend=True)  # global hooks come before a module's own
        return original(module, *args, **kwargs)

    def begins(module: nn.Module, _: object) -> None:
        if not is_dynamo_compiling():
            log.append((module, True, perf_counter_ns()))

    def ends(module: nn.Module, *_: object) -> None:
        if not is_dynamo_compiling():
            log.append((module, False, perf_counter_ns()))

    # Also called where an exception ends what a checkpoint runs again.
    handle = register_module_forward_hook(ends, always_call=True)
    with patch.object(nn.Module, "__call__", call):
        yield log
    handle.remove()


def _intervals(log: Sequence[tuple[nn.Module, bool, int]]) -> dict[nn.Module, list[Interval]]:
    times: dict[nn.Module, list[Interval]] = {}
    starts: dict[nn.Module, int] = {}
    for module, begins, time_ns in log:
        if begins:
            starts[module] = time_ns
        elif module in starts:  # others end, too
            times.setdefault(module, []).append(Interval(starts.pop(module), time_ns))
    return times


def _compared(
    captured: Captured, counted: Counted, nodes: _Nodes, forwards: Mapping[nn.Module, list[Interval]]
) -> Iterator[tuple[str, object, Leaf]]:
    """Yield the leaves of all steps but the first, by direction and by what is the same in each step."""
    units = [record for record in captured.records if isinstance(record, Unit) and record.kind == "step"]
    calls, left = counted.calls, {module: list(times) for module, times in forwards.items()}
    for unit, root in reversed([*zip(units, captured.steps, strict=True)][1:]):
        ahead, behind, place = _spans_of(root), _by_key(root), count()
        calls, own = calls[: -len(ahead)], calls[-len(ahead) :]
        for call, span in zip(reversed(own), reversed(ahead), strict=True):
            if call.children:
                continue
            key = *_key(span), next(place) if names.RECOMPUTE in span.attributes else 0
            if left.get(call.module):
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


def _interval(span: CapturedSpan, unit: Unit) -> Interval:
    return Interval(span.start_ns - unit.unix_offset_ns, span.end_ns - unit.unix_offset_ns)


def _key(span: CapturedSpan) -> tuple[object, ...]:
    return tuple(span.attributes.get(name) for name in (names.MODEL, names.MODULE_PATH, names.CALL_INDEX))
