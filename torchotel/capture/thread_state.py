"""What capture knows of one thread: open calls, finished ones, where its step stands."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch.nn import Module

from torchotel._records import ModuleCall, Registration, SpanReference
from torchotel.capture.autograd_hooks import BackwardTimestamps, RecordingSwitch
from torchotel.capture.cuda import DeviceLog, DeviceMarks, Mark
from torchotel.capture.grad_scaler import Scaling
from torchotel.capture.logged_values import LeadingOptimizer
from torchotel.capture.pending_records import PendingRecords
from torchotel.capture.step_assembler import StepListener
from torchotel.capture.step_detector import StepDetector
from torchotel.capture.step_segment import Identity, StepSegment
from torchotel.capture.tensor_watch import PendingGradient

Frame: TypeAlias = tuple[Module, int, int, Mark | None]
"""An open call: the module, the sequence number of the first node that it can make, its start, also on its device."""

MAX_CALLS = 1 << 16  # kept for one segment; what a longer one calls is counted as dropped
MAX_REGISTRATIONS = 128


class ThreadState:
    """Steps are found thread by thread, so each thread that forwards, fetches or steps has one of these."""

    def __init__(
        self,
        make_listener: Callable[[ThreadState], StepListener],
        device_marks: DeviceMarks,
        switch: RecordingSwitch,
        fault: Callable[[], None],
    ) -> None:
        self.thread = threading.current_thread()
        self.ident = threading.get_ident()
        self.stack: list[Frame] = []
        self.calls: list[ModuleCall] = []
        self.registrations: list[Registration] = []
        self.backward = BackwardTimestamps(switch, fault)
        self.device_log = DeviceLog(device_marks)
        self.pending = PendingRecords()
        self.step_detector = StepDetector(make_listener(self))
        self.in_forward = False
        self.is_repeated = False
        """The forward that runs only adds to the open segment: nothing but its end is recorded."""
        self.forwards = False
        """An outermost forward has run here."""
        self.trains = False
        """A backward has."""
        self.in_backward = 0
        self.traced_backwards = 0
        """Runs of the engine that began while something was compiled: they are the compiler's."""
        self.in_fetch = self.fetch_start_ns = self.optimizer_steps = 0
        self.stepped: tuple[int, weakref.ref[asyncio.Task[Any]] | None] = 0, None
        """The `id()` of the optimizer that stepped last, and the task of asyncio that it stepped in."""
        self.leading_optimizer = LeadingOptimizer()
        self.read_in_closure = False
        """Gradient norms were read inside the optimizer's step that runs."""
        self.scaling = Scaling()
        self.watched: list[PendingGradient] = []
        self.recompute = False
        """The outermost call that runs is a recomputation."""
        self.dropped_from: int | None = None
        """Where the calls begin that are not to be kept: transforms inside a fetch."""
        self.unordered = False
        """Nodes of the call that runs need not run in the order of their numbers."""
        self.device: str | None = None
        self.watched_root: weakref.ref[Module] | None = None
        """The outermost module while the hook is on it that sees the end of its call."""
        self.watched_root_call: int | None = None
        """Which call that is: the module may call itself."""
        self.owner: ThreadState | None = None
        """On a thread of the autograd engine: the thread whose backward it serves."""

        self.reserved_ids: dict[int, SpanReference] = {}
        """Ids that were given out for open calls, by the `id()` of their frame."""
        self.explicit_steps = 0
        """`torchotel.step()` blocks that are open, one in another."""
        self.is_answering = False
        self.current_identity: object = None
        """Identity of the step that was made current."""
        self.leave_step: Callable[[], None] | None = None
        self.leave_forward: Callable[[], None] | None = None

    def current(self) -> tuple[Identity, int] | None:
        """Return the identity and the start of the step or evaluation that is current; None for nothing."""
        fetches = self.in_fetch > 0 and not self.in_forward
        if fetches and not (self.forwards or self.thread is threading.main_thread()):
            return None  # a thread that only prefetches: no step comes of it
        return self.step_detector.current(self.fetch_start_ns if fetches else None)

    def reset_call(self) -> None:
        """Forget what belonged to one outermost call."""
        self.in_forward = self.recompute = self.unordered = False
        self.device = self.dropped_from = None
        if self.reserved_ids:
            self.reserved_ids.clear()
        if self.backward.starts:
            self.backward.clear()
        if self.owner is not None:
            self.owner, self.backward = None, self.backward.another()

    def drain_into(self, segment: StepSegment) -> None:
        """Move what was recorded since the last segment into the one that ends."""
        stamps = self.backward.log.stamps
        device_times = self.device_log.drain()
        if segment.detailed:
            segment.calls, segment.stamps, segment.device_times = self.calls.copy(), stamps.copy(), device_times
        elif device_times is not None:
            device_times.drop()
        if self.calls:
            self.calls.clear()
        if stamps:
            stamps.clear()
        if self.registrations:
            segment.registrations, self.registrations = self.registrations, []
        if self.watched:
            segment.watched, self.watched = self.watched, []


class Threads:
    """The states of all threads."""

    def __init__(self) -> None:
        self.all: set[ThreadState] = set()
        self.forwarding: set[ThreadState] = set()
        """Those that have run a forward."""

    def others_forward(self) -> bool:
        """Return whether another thread than the calling one runs a forward."""
        own = threading.get_ident()
        return any(thread.in_forward and thread.thread.ident != own for thread in list(self.all))

    def remove_ended(self) -> Iterator[ThreadState]:
        """Yield the state of each thread that has ended, once."""
        for thread in list(self.all):
            if thread.thread.is_alive():
                continue
            try:
                self.all.remove(thread)
            except KeyError:
                continue  # another thread hands it over
            self.forwarding.discard(thread)
            yield thread


class CurrentThread(threading.local):
    """What belongs to the calling thread: module hooks ask at every call, and an attribute is the cheapest answer.

    Args:
        new_thread: Makes the state of a thread that asks for the first time.
    """

    def __init__(self, new_thread: Callable[[], ThreadState]) -> None:
        self.state = new_thread()
