"""What calls take on the clock of their device, by a device of the tests' own: only its clock is made up."""

import weakref
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
from support.captured_records import Handed
from support.recorded_training import Seen, recorded
from support.simulated_device_clock import MS, DeviceClock, Layer, net
from support.single_step_training import train
from torch import AcceleratorError, Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchotel
from torchotel._records import StepRecord
from torchotel._utils.gil import GilYielder
from torchotel.capture import cuda, recorder
from torchotel.capture.recorder import Capture
from torchotel.metrics import instruments as table
from torchotel.metrics.store import Metrics
from torchotel.sampling.detail import Detail
from torchotel.tracing.call_tree import CallTreeBuilder

ONE = torch.ones(2, 4)
WHOLE_STEP = {
    "forward Sequential": 0.008,
    "forward 0": 0.003,
    "forward 1": 0.005,
    "backward Sequential": 0.027,
    "backward 1": 0.02,
    "backward 0": 0.007,
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> DeviceClock:
    """Take this clock for CUDA's."""
    made = DeviceClock()
    monkeypatch.setattr(recorder, "CudaClock", lambda: made)
    return made


def times_s(root: Seen) -> dict[str, Any]:
    """Give the device time of each module span."""
    spans = [seen for seen in root.walk() if "torch.direction" in seen.attributes]
    return {seen.name: seen.attributes.get("torch.device_time") for seen in spans}


def captured(clock: DeviceClock, model: nn.Module, steps: int = 1) -> tuple[Capture, Handed]:
    """Train with nothing but capture, and leave it open."""
    handed = Handed()
    found = Capture(handed.append, Detail("all"), gradient_norms=False, clock=clock)
    found.install()
    train(model, ONE, steps=steps)
    return found, handed


def forwards_ms(handed: Handed) -> list[list[int]]:
    """Give what the forwards of each step took, in the order that they ended."""
    units = [unit for unit in handed.records if isinstance(unit, StepRecord)]
    return [[ns // MS for times in unit.device_times for ns in times.forwards_ns.values()] for unit in units]


def test_every_call_has_its_device_time(clock: DeviceClock) -> None:
    """In seconds by the device's clock, forward and backward; a container's holds its children's."""
    with recorded("all") as run:
        train(net(clock), ONE, steps=2)
    assert [times_s(step) for step in run.steps] == [WHOLE_STEP] * 2


def test_only_where_there_is_a_device(clock: DeviceClock) -> None:
    """Nothing is asked of a device that the process does not use, and spans say nothing of one."""
    clock.running = False
    with recorded("all") as run:
        train(net(clock), ONE)
    assert set(times_s(run.steps[0]).values()) == {None}
    assert clock.made == 0


def test_inputs_by_name(clock: DeviceClock) -> None:
    """A call without positional tensors is timed on the device of its parameters."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer(clock, 3, 7)

        def forward(self, *, x: Tensor) -> Tensor:
            return self.layer(x)  # type: ignore[no-any-return]  # a module call is Any

    with recorded("all") as run:
        train(Named(), x=ONE)
    assert times_s(run.steps[0])["forward Named"] == 0.003


def test_recomputation(clock: DeviceClock) -> None:
    """What a checkpoint runs again inside the backward is timed too."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer(clock, 3, 7)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layer, x, use_reentrant=False)  # type: ignore[no-any-return]  # torch's

    with recorded("all") as run:
        train(Checkpointed(), ONE.clone().requires_grad_())
    found = [seen.attributes["torch.device_time"] for seen in run.steps[0].find_all("forward layer")]
    assert found == [0.003, 0.003]


def test_two_backwards_through_one_forward(clock: DeviceClock) -> None:
    """Each run of the engine has its own device time."""
    model = net(clock)
    with recorded("all") as run, torchotel.step():
        loss = model(ONE).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    found = [seen.attributes["torch.device_time"] for seen in run.steps[0].find_all("backward 1")]
    assert found == [0.02, 0.02]


def test_the_counter_adds_them_up(clock: DeviceClock) -> None:
    """`torch.module.device_time` has a series for each module and direction."""
    found, handed = captured(clock, net(clock), steps=3)
    found.uninstall()
    found.end()
    sliced = GilYielder()
    metrics, timer = Metrics(dict, dict, yielder=GilYielder()), CallTreeBuilder(sliced)
    for unit in handed.records:
        assert isinstance(unit, StepRecord)
        metrics.add(unit, timer.build(unit), None)
    points = {(path, way): round(s, 6) for (_, path, _, way), s in metrics.points(table.MODULE_DEVICE_TIME)}
    assert points == {
        ("Sequential", "forward"): 0.024,
        ("0", "forward"): 0.009,
        ("1", "forward"): 0.015,
        ("Sequential", "backward"): 0.081,
        ("0", "backward"): 0.021,
        ("1", "backward"): 0.06,
    }


def test_a_step_waits_for_its_device(clock: DeviceClock) -> None:
    """Two steps at most, without a wait for the device; then it goes without."""
    clock.reached = False
    found, handed = captured(clock, net(clock), steps=5)
    assert forwards_ms(handed) == [[], []]  # three are here: two wait, and the last one has not ended
    clock.reached = True
    train(net(clock), ONE)
    assert forwards_ms(handed) == [[], [], [3, 5, 8], [3, 5, 8], [3, 5, 8]]
    assert clock.waits == 0
    found.uninstall()
    found.end()


def test_a_flush_waits_for_the_device(clock: DeviceClock) -> None:
    """At the end all times are there."""
    clock.reached = False
    found, handed = captured(clock, net(clock), steps=2)
    found.uninstall()
    found.end()
    assert forwards_ms(handed) == [[3, 5, 8]] * 2
    assert clock.waits > 0


def test_an_evaluation_does_not_wait(clock: DeviceClock) -> None:
    """The trace of a request is there when the request is done: with its device times if the device is, too."""
    found, handed = captured(clock, net(clock), steps=0)
    for reached in (True, False):
        clock.reached = reached
        with torch.no_grad():
            net(clock)(ONE)
    assert forwards_ms(handed) == [[3, 5, 8], []]
    found.uninstall()
    found.end()


def test_events_are_used_again(clock: DeviceClock) -> None:
    """Later steps make none, and a pool is no larger than what waits."""
    model = net(clock)
    found, _ = captured(clock, model, steps=4)
    made = clock.made
    train(model, ONE, steps=20)
    assert clock.made == made
    found.uninstall()
    found.end()


def test_steps_without_detail_mark_nothing(clock: DeviceClock) -> None:
    """Between detailed steps nothing is recorded on the device."""
    with recorded("off"):
        train(net(clock), ONE, steps=3)
    assert clock.made == 0


def test_evaluations_that_do_not_wait_keep_no_events(clock: DeviceClock) -> None:
    """They have no device time where the device is behind, and their events are used again at once."""
    found, handed = captured(clock, net(clock), steps=0)
    clock.reached = False
    model = net(clock)
    with torch.no_grad():
        for _ in range(20):
            model(ONE)
    made = clock.made
    found.uninstall()
    found.end()
    assert (len(handed), made) == (20, 6)
    assert forwards_ms(handed) == [[]] * 20


def test_nothing_while_a_graph_is_captured(clock: DeviceClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """No event is recorded, none is asked for: either would end up in the CUDA graph, or end its capture."""
    found, handed = captured(clock, net(clock))
    made, asked = clock.made, clock.queries
    monkeypatch.setattr(cuda, "is_capturing", lambda: True)
    train(net(clock), ONE, steps=2)
    assert (clock.made, clock.queries) == (made, asked)
    monkeypatch.undo()
    found.uninstall()
    found.end()
    assert [times for times in forwards_ms(handed) if times] == [[3, 5, 8]]


def test_a_device_that_fails_ends_device_times_alone(clock: DeviceClock, caplog: pytest.LogCaptureFixture) -> None:
    """Its own guard switches it off; every step is there all the same, and the losses are the same."""
    model, plain = net(clock), net(clock)
    losses = train(plain, ONE, steps=12)
    clock.broken = True
    found, handed = captured(clock, model, steps=0)
    assert [torch.equal(*pair) for pair in zip(train(model, ONE, steps=12), losses, strict=True)] == [True] * 14
    found.uninstall()
    found.end()
    assert forwards_ms(handed) == [[]] * 12
    assert (found.guard.faults, found.device_marks.guard.faults) == (0, 10)
    assert not found.device_marks.on
    assert [record.message.split("\n")[0] for record in caplog.records] == [
        "internal error in device times, your program goes on:",
        "device times switched off after 10 internal errors",
    ]


def test_a_device_that_has_failed(
    clock: DeviceClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No call of a CUDA device works any more. The program's own call says so, torchotel says nothing."""

    def fail() -> NoReturn:
        raise AcceleratorError("CUDA error: device-side assert triggered")

    found, handed = captured(clock, net(clock), steps=2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fail)
    train(net(clock), ONE, steps=2)
    found.uninstall()
    found.end()
    assert forwards_ms(handed) == [[3, 5, 8], [], [], []]
    assert (found.device_marks.guard.faults, caplog.records) == (0, [])


def test_a_forward_that_raises(clock: DeviceClock) -> None:
    """The failed call has its time until then, and the calls around it too."""

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            clock.now_ns += 2 * MS
            raise ValueError("no")

    found, handed = captured(clock, net(clock), steps=0)
    with pytest.raises(ValueError, match="no"):
        nn.Sequential(Layer(clock, 3, 7), Fails())(ONE)
    found.uninstall()
    found.end()
    assert forwards_ms(handed) == [[3, 2, 5]]


def test_no_tensor_is_kept(clock: DeviceClock) -> None:
    """Marks hold numbers and events: the graph of a step goes with its loss."""
    found, _ = captured(clock, net(clock), steps=0)
    output = net(clock)(ONE)
    gone = weakref.ref(output)
    del output
    assert gone() is None
    found.uninstall()
    found.end()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no device")
def test_on_a_device() -> None:
    """A real device's times are those of its work, not of the host's asking: no wait, no sync."""
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)]).cuda()
    x = torch.ones(2048, 2048, device="cuda")
    train(model, x, loss=partial(torch.sum), steps=3)
    torch.cuda.synchronize()
    with recorded("all", gradient_norms=False) as run:
        torch.cuda.set_sync_debug_mode("error")
        try:
            train(model, x, loss=torch.sum, steps=3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = times_s(run.steps[-1])
    assert len(found) == 10
    for way in ("forward", "backward"):
        layers = [found[f"{way} {index}"] for index in range(4)]
        assert 0 < sum(layers) <= found[f"{way} Sequential"] * 1.01
        assert all(time_s > 1e-5 for time_s in layers)  # 17 GFLOP forward, twice that backward
