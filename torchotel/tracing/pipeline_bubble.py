"""The bubble of a pipeline schedule: the share of its time in which the rank waits for other stages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchotel._records import StepRecord
    from torchotel._utils.gil import GilYielder
    from torchotel.tracing.call_tree import CallTree


def bubble_ratio(record: StepRecord, tree: CallTree, yielder: GilYielder) -> float | None:
    """Return the share of a schedule's time without a forward or a backward of this rank; None without a schedule.

    The schedule lasts from the first forward of a stage to the end of the last backward. On a device other than the
    CPU the calls return before the device has run them, so the share is not known.
    """
    own = yielder(range(tree.first_own, len(tree.calls)))
    forwards = [tree.calls[index] for index in own if tree.parents[index] < 0]
    stages = [call for call in forwards if call.note is not None and call.note.microbatch is not None]
    if not stages or any(call.signature.device not in {None, "cpu"} for call in stages):
        return None
    start_ns = min(call.start_ns for call in stages)
    busy = [(call.start_ns, call.end_ns) for call in forwards]
    busy += [(phase.start_ns, phase.end_ns) for phase in record.phases if phase.kind == "backward"]
    busy = [(begun_ns, ended_ns) for begun_ns, ended_ns in busy if begun_ns >= start_ns]
    length_ns = max(ended_ns for _, ended_ns in busy) - start_ns
    return 1 - _covered_ns(busy) / length_ns if length_ns else 0.0


def _covered_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the time in any of the intervals, which may overlap."""
    covered_ns, until_ns = 0, -1
    for start_ns, end_ns in sorted(intervals):
        covered_ns += max(0, end_ns - max(start_ns, until_ns))
        until_ns = max(until_ns, end_ns)
    return covered_ns
