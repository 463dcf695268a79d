"""Numbers on their way from a device, and what stands for one here: an event and a buffer that we fill."""

import weakref
from typing import Any

import pytest
import torch
from support.gradient_norm_training import Operations
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchotel.capture.async_readback import UNKNOWN, AsyncReadback, read_async
from torchotel.capture.cuda import device_memory
from torchotel.capture.tensor_norms import Norms


class Stream:
    """A device's event, reached when we say so; it counts who waits for it."""

    def __init__(self) -> None:
        self.reached = False
        self.waits = 0

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.waits += 1
        self.reached = True


def test_the_user_may_overwrite() -> None:
    """On the CPU the numbers are there at once, those of the moment."""
    tensor = torch.tensor(3.0, requires_grad=True)
    loss = tensor * 2
    reading = read_async([loss, torch.ones(1, 1)])
    with torch.no_grad():
        loss.zero_()
    assert reading.ready()
    assert reading.values() == [6.0, 1.0]


def test_types_may_be_mixed() -> None:
    """Whole numbers and truth values become floats, large ones exactly."""
    tensors = [torch.tensor(2**40 + 1), torch.tensor(0.5), torch.tensor(True), torch.tensor(1.5).bfloat16()]  # noqa: FBT003  # a value, not a switch
    reading = read_async(tensors)
    assert reading.values() == [2.0**40 + 1, 0.5, 1.0, 1.5]
    assert all(type(value) is float for value in reading.values())
    (truth,) = read_async([torch.tensor(True)]).values()  # noqa: FBT003  # a value, not a switch
    assert type(truth) is float


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones((), device="meta"),
        torch.ones(2),
        torch.ones((), dtype=torch.complex64),
        torch.zeros(0),
    ],
    ids=["meta", "two elements", "complex", "empty"],
)
def test_what_can_not_be_read(tensor: Tensor) -> None:
    """Such a reading is ready and has no numbers."""
    reading = read_async([torch.ones(()), tensor])
    assert reading.ready()
    assert reading.values() == []
    reading.wait()


def test_fakes_and_transforms_can_not_be_read() -> None:
    """Nor can what has no numbers of its own."""
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(())
        assert read_async([fake]).values() == []
    assert read_async([fake]).values() == []
    found = []

    def look(x: Tensor) -> Tensor:
        found.append(read_async([x]).values())
        return x

    torch.func.vmap(look)(torch.ones(2))
    torch.func.grad(look)(torch.ones(()))
    assert found == [[], []]


def test_nothing_is_kept() -> None:
    """A reading holds neither the tensor nor its graph."""
    x = torch.ones((), requires_grad=True)
    loss = x * 2
    reading = read_async([loss])
    gone = weakref.ref(loss)
    del loss
    assert gone() is None
    assert reading.values() == [2.0]


class Functions(TorchFunctionMode):
    """Count the functions that a mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("mode", [Operations, Functions])
def test_modes_do_not_see_it(mode: type[Operations | Functions], count: int) -> None:
    """A counter of operations counts the user's alone, and a default device changes nothing."""
    tensors = [torch.ones(()) for _ in range(count)]
    with torch.device("meta"), mode() as operations:
        seen_before = operations.seen
        reading = read_async(tensors)
        seen_after = operations.seen
    assert reading.values() == [1.0] * count
    assert seen_after == seen_before


def test_one_number_is_read_at_once() -> None:
    """Of every type, and of a loss that has a graph without a warning."""
    x = torch.tensor(3.0, requires_grad=True)
    whole, truth = torch.tensor([[2**40 + 1]]), torch.tensor(True)  # noqa: FBT003  # a value, not a switch
    found = [read_async([tensor]).values() for tensor in (x * 2, x, whole, truth, torch.tensor(1.5).bfloat16())]
    assert found == [[6.0], [3.0], [2.0**40 + 1], [1.0], [1.5]]
    assert {type(value) for (value,) in found} == {float}


def test_readiness_is_asked_without_waiting() -> None:
    """Until the event is reached there are no numbers, and nobody has waited."""
    stream, buffer = Stream(), torch.zeros(2)
    reading = AsyncReadback(buffer, stream)
    assert not reading.ready()
    assert reading.values() == []
    buffer.copy_(torch.tensor([1.0, 2.0]))
    stream.reached = True
    assert reading.ready()
    assert reading.values() == [1.0, 2.0]
    assert stream.waits == 0
    stream.reached = False
    assert reading.ready()


def test_a_flush_waits() -> None:
    """`wait` waits once, and the numbers are there."""
    stream, buffer = Stream(), torch.tensor([4.0])
    reading = AsyncReadback(buffer, stream)
    reading.wait()
    reading.wait()
    assert reading.values() == [4.0]
    assert stream.waits == 1


def test_norms_of_several_devices_come_together() -> None:
    """As long as one device's are missing there are none; pieces of a tensor are put together."""
    stream = Stream()
    norms = Norms(
        2, [(AsyncReadback(torch.tensor([3.0, 4.0]), None), [0, 0]), (AsyncReadback(torch.tensor([2.0]), stream), [1])]
    )
    assert not norms.ready()
    assert norms.values() is None
    stream.reached = True
    assert norms.ready()
    assert norms.values() == [5.0, 2.0]


def test_unknown_has_no_norms() -> None:
    """What can't be read leaves no norms behind."""
    assert Norms(1, [(UNKNOWN, [0])]).values() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is there")
def test_memory_where_there_is_no_device() -> None:
    """It starts no device to ask for its memory."""
    assert device_memory() == ()
    assert not torch.cuda.is_initialized()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no device")
def test_on_a_device() -> None:
    """A number comes from a real device without a wait, and its memory is counted."""
    tensor = torch.full((), 3.0, device="cuda")
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")
        try:
            reading = read_async([tensor])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    reading.wait()
    assert reading.values() == [3.0]
    (memory,) = device_memory()
    assert memory.device == "cuda:0"
    assert memory.reserved >= memory.peak >= memory.allocated > 0
