"""How true the times are: every autograd node and every leaf's forward timed by hooks of this file's own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, NamedTuple
from unittest.mock import patch

from torch import Tensor, nn

from fidelity.counted import Call, Counted, counting, nodes_of
from fidelity.subjects import Subject
from fidelity.training import train
from torchotel import _names as names
from torchotel._records import Unit
from torchotel.testing import Captured, CapturedSpan, capture


class Interval(NamedTuple):
    """When something ran, in nanoseconds of one clock."""

    start_ns: int
    end_ns: int


@dataclass
class Errors:
    """How spans of leaves differ from the truth."""

    true_ns: int = 0
    """Sum of the true durations."""
    seen_ns: int = 0
    """Sum of the spans' durations."""
    ends_ns: list[int] = field(default_factory=list)
    """Of each start and each end, how far it is off."""
    ratios: list[float] = field(default_factory=list)
    """Of each leaf, its span over the truth."""

    def add(self, true: Interval, seen: Interval) -> None:
        """Compare one."""
        self.true_ns += true.end_ns - true.start_ns
        self.seen_ns += seen.end_ns - seen.start_ns
        self.ratios.append((seen.end_ns - seen.start_ns) / (true.end_ns - true.start_ns))
        self.ends_ns += [abs(seen.start_ns - true.start_ns), abs(seen.end_ns - true.end_ns)]

    @property
    def ratio(self) -> float:
        """Give the sum of the spans over the truth."""
        return self.seen_ns / self.true_ns

    @property
    def end_us(self) -> float:
        """Give what the sum is off by, for each end, in microseconds."""
        return abs(self.seen_ns - self.true_ns) / len(self.ends_ns) / 1e3

    @property
    def worst_us(self) -> float:
        """Give the worst error of an end, in microseconds."""
        return max(self.ends_ns) / 1e3


class Truth(NamedTuple):
    """Both directions."""

    forward: Errors
    backward: Errors


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


def measure(subject: Subject) -> Truth:
    """Train a subject with all detail, and compare the last step's leaves with the truth.

    The first step is left out: it loads code.
    """
    nodes = _Nodes()
    forwards: dict[nn.Module, list[Interval]] = {}
    with capture(max_spans=None) as captured, counting(nodes.watch) as counted, _timed_leaves(forwards):
        train(subject, counted.built)
    return _compared(captured, counted, nodes, forwards)


def least_disturbed(subject: Subject, times: int = 3) -> Truth:
    """Measure several times, and give the quickest: where other programs run, they take the others' time."""
    truths = [measure(subject) for _ in range(times)]
    return min(truths, key=lambda truth: truth.backward.true_ns + truth.backward.seen_ns)


@contextmanager
def _timed_leaves(times: dict[nn.Module, list[Interval]]) -> Iterator[None]:
    """Time the forward itself of modules that hold no others, inside of all hooks."""
    original: Callable[..., Any] = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if "forward" not in vars(module) and not any(module.children()):
            module.forward = _timed(module.forward, times.setdefault(module, []))
        return original(module, *args, **kwargs)

    with patch.object(nn.Module, "__call__", call):
        yield


def _timed(forward: Callable[..., Any], times: list[Interval]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start_ns = perf_counter_ns()
        output = forward(*args, **kwargs)
        times.append(Interval(start_ns, perf_counter_ns()))
        return output

    return timed


def _compared(
    captured: Captured, counted: Counted, truth: _Nodes, forwards: Mapping[nn.Module, list[Interval]]
) -> Truth:
    unit = [record for record in captured.records if isinstance(record, Unit) and record.kind == "step"][-1]
    spans = [span for span in captured.steps[-1].walk() if names.DIRECTION in span.attributes]
    of = {
        direction: [span for span in spans if span.attributes[names.DIRECTION] == direction]
        for direction in ("forward", "backward")
    }
    ahead = sorted(of["forward"], key=lambda span: span.start_ns)
    behind: dict[object, list[CapturedSpan]] = {}  # several where a checkpoint runs a module again more than once
    for span in sorted(of["backward"], key=lambda span: span.start_ns):
        behind.setdefault(_key(span), []).append(span)
    result = Truth(Errors(), Errors())
    left = {module: list(times) for module, times in forwards.items()}
    for call, span in reversed(list(zip(counted.calls[-len(ahead) :], ahead, strict=True))):
        if call.children:
            continue
        if left.get(call.module):
            result.forward.add(left[call.module].pop(), _interval(span, unit))
        true = truth.of(call)
        if true is not None:
            result.backward.add(true, _interval(behind[_key(span)].pop(), unit))
    return result


def _interval(span: CapturedSpan, unit: Unit) -> Interval:
    return Interval(span.start_ns - unit.unix_offset_ns, span.end_ns - unit.unix_offset_ns)


def _key(span: CapturedSpan) -> tuple[object, ...]:
    return tuple(span.attributes.get(name) for name in (names.MODEL, names.MODULE_PATH, names.CALL_INDEX))
