"""The share of a pipeline schedule's time in which a rank waits."""

import pytest
from support.call_signatures import call_signature

from torchotel._records import CallNote, ModuleCall, Phase, StepRecord
from torchotel._utils.gil import GilYielder
from torchotel.tracing.call_tree import CallTree, bubble_ratio


def _ratio(calls: list[ModuleCall], *backwards: tuple[int, int]) -> float | None:
    phases = [Phase("backward", start_ns, end_ns) for start_ns, end_ns in backwards]
    record = StepRecord("step", 0, 0, 200, 0, 1, detailed=True, calls=calls, phases=phases)
    return bubble_ratio(record, CallTree(calls, parents=[-1] * len(calls)), GilYielder())


def _forward(start_ns: int, end_ns: int, microbatch: int | None = None, device: str = "cpu") -> ModuleCall:
    note = None if microbatch is None else CallNote(microbatch=(0, microbatch))
    return ModuleCall(call_signature(device=device), start_ns, end_ns, (), (), note)


def test_the_time_between_stages_is_the_bubble() -> None:
    """Of 100 ns from the first forward to the last backward, 60 are computed; a nested backward counts once."""
    calls = [_forward(20, 30), _forward(50, 60, 0), _forward(60, 70, 1), _forward(80, 90)]
    assert _ratio(calls, (100, 120), (105, 110), (140, 150)) == pytest.approx(0.4)


def test_without_a_schedule_or_on_another_device_there_is_none() -> None:
    assert _ratio([_forward(0, 10)], (10, 20)) is None
    assert _ratio([_forward(0, 10, 0, device="cuda:0")], (10, 20)) is None
