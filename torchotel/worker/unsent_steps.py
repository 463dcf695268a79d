"""The steps of a training process that ended without a shutdown, from the phases on its status page.

A step is recorded when the next one begins. So the companion has no record of the step that was open, and often none of
the step before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from torchotel._limits import MAX_BETWEEN_NS
from torchotel._records import Error, Phase, StepRecord
from torchotel.worker.status_page import MAX_PHASES, MAX_READABLE, PagePhase, PageReader


@dataclass(slots=True)
class _Covered:
    """What the records so far cover."""

    next_numbers: dict[str, int] = field(default_factory=lambda: {"step": 0, "evaluation": 0})
    has_step: bool = False
    step_end_ns: int = 0
    idle_since_ns: int = 0
    """End of the last step, plus the time of evaluations since; 0: there was no step."""
    evaluated: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=MAX_PHASES))
    """Starts and ends of evaluations: the record of the step before them may follow."""

    def add(self, record: StepRecord, thread: int) -> None:
        """Add a record; `thread` is the one whose phases are on the page."""
        self.has_step |= record.kind == "step"
        if record.kind in self.next_numbers:
            self.next_numbers[record.kind] = max(self.next_numbers[record.kind], record.number + 1)
        if record.thread != thread:
            return
        if record.kind == "step":
            self.step_end_ns = max(self.step_end_ns, record.end_ns)
            later = [end_ns - start_ns for start_ns, end_ns in self.evaluated if start_ns > self.step_end_ns]
            self.idle_since_ns = self.step_end_ns + sum(later)
        else:
            self.evaluated.append((record.start_ns, record.end_ns))
            if self.idle_since_ns:
                self.idle_since_ns += record.end_ns - record.start_ns

    def has(self, phase: PagePhase) -> bool:
        """Return whether a record has the phase."""
        start_ns = phase.start_ns
        return start_ns <= self.step_end_ns or any(first <= start_ns <= last for first, last in self.evaluated)


class UnsentSteps:
    """Make records of the phases on the page that no received record covers.

    Args:
        page: The status page.
    """

    def __init__(self, page: PageReader) -> None:
        self._page = page
        self._received = _Covered()

    def add_received(self, record: StepRecord) -> None:
        """Note what a received record covers."""
        self._received.add(record, self._page.thread)

    def records(self, phases: Sequence[PagePhase], now_ns: int, error: Error) -> list[StepRecord]:
        """Return the records that were not sent; the last one has the error, unless its step had ended.

        Args:
            phases: The phases of the page.
            now_ns: When the end of the process, or its stall, was noticed.
            error: Why the process ended or stalls.
        """
        if self._page.is_partial and not self._received.has_step:
            return []  # the companion was started again, and does not know the number of the step
        covered = deepcopy(self._received)  # with the records that are made here
        unsent = [phase for phase in phases if not covered.has(phase)]
        if len(unsent) == len(phases) >= MAX_READABLE:
            covered.idle_since_ns = 0  # the first phases of the step were replaced, so its start is unknown
        groups = _group(unsent)
        last = groups[-1] if groups else ()
        if last and all(phase.kind == "data" and phase.end_ns for phase in last):
            groups.pop()  # the fetch may have found its iterator at the end, so no step has begun
        return [
            self._record(group, covered, now_ns, error if group is last and not _is_finished(group) else None)
            for group in groups
        ]

    def open_record(self, phases: Sequence[PagePhase], now_ns: int, error: Error) -> StepRecord | None:
        """Return the step or evaluation that has not ended, with the error; None if none is open."""
        records = self.records(phases, now_ns, error)
        return records[-1] if records and records[-1].error is error else None

    def _record(self, group: Sequence[PagePhase], covered: _Covered, now_ns: int, error: Error | None) -> StepRecord:
        kind = "evaluation" if _evaluates(group) else "step"
        number = covered.next_numbers[kind]
        phases = _phases(group, now_ns, error)
        record = StepRecord(
            kind,
            number,
            phases[0].start_ns,
            max(phase.end_ns for phase in phases),
            time.time_ns() - time.perf_counter_ns(),
            self._page.thread,
            detailed=False,
            grad=kind == "step",
            training=kind == "step",
            phases=phases,
            error=error,
            alignment=next((phase.alignment for phase in group if phase.alignment), None) if kind == "step" else None,
        )
        idle_ns = covered.idle_since_ns
        if kind == "step" and idle_ns and 0 < record.start_ns - idle_ns <= MAX_BETWEEN_NS:
            record.phases = [Phase("between", idle_ns, record.start_ns), *phases]
            record.start_ns = idle_ns
        covered.add(record, self._page.thread)
        return record


def _group(phases: Sequence[PagePhase]) -> list[list[PagePhase]]:
    """Divide phases into steps and evaluations, by the rule of the step detector for one optimizer."""
    has_fetch = any(phase.kind == "data" for phase in phases)
    groups: list[list[PagePhase]] = []
    for phase in phases:
        if groups and not _begins_group(phase, groups[-1], has_fetch=has_fetch):
            groups[-1].append(phase)
        else:
            groups.append([phase])
    return groups


def _begins_group(phase: PagePhase, group: Sequence[PagePhase], *, has_fetch: bool) -> bool:
    """Return whether a phase begins another step or evaluation than that of the phases before it."""
    outermost = _last_outermost(group)
    if not outermost.end_ns or phase.start_ns < outermost.end_ns:
        return False
    if _evaluates(group):
        return phase.kind == "data" or group[0].kind != "data"
    if not _is_finished(group) or phase.kind == "optimizer":
        return False
    # After a fetch, further networks may train on the same batch.
    return phase.kind == "data" or not (has_fetch and phase.grad)


def _last_outermost(group: Sequence[PagePhase]) -> PagePhase:
    """Return the last phase that is inside of no other."""
    last = group[0]
    for phase in group:
        if last.end_ns and phase.start_ns >= last.end_ns:
            last = phase
    return last


def _is_finished(group: Sequence[PagePhase]) -> bool:
    """Return whether the last phase is an ended optimizer phase, or a backward that optimizers stepped in."""
    last = _last_outermost(group)
    return last.end_ns > 0 and any(phase.kind == "optimizer" and phase.start_ns >= last.start_ns for phase in group)


def _evaluates(group: Sequence[PagePhase]) -> bool:
    """Return whether the phases are forwards without gradients, and fetches."""
    others = [phase for phase in group if phase.kind != "data"]
    return bool(others) and all(phase.kind == "forward" and not phase.grad for phase in others)


def _phases(group: Sequence[PagePhase], now_ns: int, error: Error | None) -> list[Phase]:
    """Return the phases as in a record: one forward reaches from the first root call to the backward."""
    phases: list[Phase] = []
    for kind, start_ns, end_ns, *_ in group:
        phase = Phase(kind, start_ns, end_ns)
        if not end_ns:
            phase = Phase(kind, start_ns, now_ns, error, estimated="end")
        last = phases[-1] if phases else None
        if last is not None and last.kind == "forward" and last.end_ns <= start_ns:
            if kind == "forward":
                phase = phase._replace(start_ns=phases.pop().start_ns)
            elif kind == "backward":
                phases[-1] = last._replace(end_ns=start_ns)
        phases.append(phase)
    return phases
