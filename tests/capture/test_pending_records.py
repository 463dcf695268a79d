"""Steps wait for numbers on their way from a device, in order, two at most."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from torchotel._records import Log, ModuleInfo, Phase, Recordable, StepRecord
from torchotel.capture.gradient_norms import AFTER_BACKWARD, SelectedNorms
from torchotel.capture.logged_values import Logged
from torchotel.capture.pending_records import PendingLog, PendingRecord, PendingRecords
from torchotel.capture.recorder import Capture
from torchotel.capture.step_segment import StepSegment
from torchotel.sampling.detail import Detail

LAYER = ModuleInfo("Net", "layer", "Linear", 4, 1)


class Arriving(SelectedNorms):
    """Norms that a device has not sent yet: its clock is ours here."""

    def __init__(self, *, arrived: bool = False) -> None:
        super().__init__({})
        self.arrived = arrived

    def ready(self) -> bool:
        return self.arrived

    def wait(self) -> None:
        self.arrived = True

    def owners(self) -> Iterator[ModuleInfo]:
        yield LAYER

    def values(self) -> list[tuple[ModuleInfo, float]] | None:
        return [(LAYER, 1.0)] if self.arrived else None


def _held(number: int, norms: Arriving | None = None, kind: str = "step") -> PendingRecord:
    return PendingRecord(
        kind, number, [StepSegment(0, 0, gradients={} if norms is None else {AFTER_BACKWARD: norms})], 0
    )


def _seen(given: list[Recordable]) -> list[tuple[int, bool]]:
    units = [handed.record() for handed in given]
    return [(unit.number, unit.gradients is not None) for unit in units if isinstance(unit, StepRecord)]


def test_what_is_ready_goes_at_once_and_in_order() -> None:
    """A step that waits holds up those behind it."""
    steps, given = PendingRecords(), list[Recordable]()
    first = Arriving()
    steps.add(_held(0, first))
    steps.release(given.append)
    steps.add(_held(1, Arriving(arrived=True)))
    steps.release(given.append)
    assert given == []
    first.arrived = True
    steps.release(given.append)
    assert _seen(given) == [(0, True), (1, True)]


def test_two_wait_at_most() -> None:
    """The oldest goes without its numbers: a device that never answers holds nothing up for good."""
    steps, given = PendingRecords(), list[Recordable]()
    for number in range(4):
        steps.add(_held(number, Arriving()))
        steps.release(given.append)
    assert _seen(given) == [(0, False), (1, False)]


def test_the_first_step_goes_when_the_second_ends() -> None:
    """Only then is it known that the optimizer repeats; later steps go when the next one begins."""
    given: list[Recordable] = []
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    capture = Capture(given.append, Detail("all"))
    capture.install()
    counts = []
    for _ in range(4):
        loss = model(torch.ones(2, 4)).sum()
        counts.append(len(given))
        loss.backward()
        optimizer.step()
        counts.append(len(given))
    capture.uninstall()
    capture.end()
    assert (counts, len(given)) == ([0, 0, 0, 1, 2, 2, 3, 3], 4)


def test_a_flush_waits_for_all() -> None:
    """And hands over everything."""
    steps, given = PendingRecords(), list[Recordable]()
    for number in range(2):
        steps.add(_held(number, Arriving()))
    steps.release_all(given.append)
    assert _seen(given) == [(0, True), (1, True)]


def test_a_flush_in_the_midst_of_a_hand_over() -> None:
    """A signal's handler may flush at any moment: each step is handed over once."""
    steps, given = PendingRecords(), list[Recordable]()

    class Interrupted(Arriving):
        def ready(self) -> bool:
            steps.release_all(given.append)
            return True

    steps.add(_held(0, Interrupted()))
    steps.add(_held(1))
    steps.release(given.append)
    assert _seen(given) == [(0, True), (1, False)]


@pytest.mark.parametrize(("kind", "parts", "spans"), [("step", 2, 7), ("evaluation", 1, 4), ("data", 1, 1)])
def test_what_waits_weighs_as_much_as_its_record(kind: str, parts: int, spans: int) -> None:
    """What is lost before it is a record is counted as what it would have been."""
    phases = [Phase("data", start, start + 1) for start in range(3)]
    held = PendingRecord(kind, 0, [StepSegment(0, 3, fetched=True, phases=phases) for _ in range(parts)], 0)
    assert (held.span_estimate(), held.record().span_estimate()) == (spans, spans)


def test_the_last_word_goes_to_the_last_step() -> None:
    """Not to an evaluation or to a log that came after it."""
    steps, given = PendingRecords(), list[Recordable]()
    assert steps.last_step() is None
    steps.add(_held(0))
    steps.add(_held(0, kind="evaluation"))
    steps.add(PendingLog(Log(0, 0, {}), Logged()))
    last = steps.last_step()
    assert last is not None
    last.add({"epoch": 3, "samples": 2})
    last.add({"samples": 3})
    steps.release_all(given.append)
    step, evaluation, log = (handed.record() for handed in given)
    assert isinstance(step, StepRecord)
    assert step.values == {"epoch": 3, "samples": 5}
    assert isinstance(evaluation, StepRecord)
    assert evaluation.values == {}
    assert isinstance(log, Log)
