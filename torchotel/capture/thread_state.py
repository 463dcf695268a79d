"""The states of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from torchotel._records import PhaseLog
from torchotel.capture.active_span import ContextState
from torchotel.capture.autograd_hooks import BackwardTimestamps, RecordingSwitch
from torchotel.capture.cuda import DeviceLog, DeviceMarks
from torchotel.capture.event_hooks import EventState
from torchotel.capture.grad_scaler import Scaling
from torchotel.capture.hook_manager import ExitWatch
from torchotel.capture.module_calls import CallStack
from torchotel.capture.pending_records import PendingRecords
from torchotel.capture.root_calls import RootCall
from torchotel.capture.step_assembler import StepListener
from torchotel.capture.step_detector import StepDetector
from torchotel.capture.step_segment import Identity, StepSegment
from torchotel.capture.tensor_watch import PendingGradient


class ThreadState:
    """The state of one thread: each thread that forwards, fetches or steps has one, since steps are found by thread.

    Args:
        make_listener: Makes the listener of the thread's step detector.
        device_marks: Marks on the clocks of devices.
        switch: Whether anything is recorded.
        fault: Called for an internal error, in its `except` block.
        phase_log: Gets the phases of the main thread; None: none gets them.
    """

    def __init__(
        self,
        make_listener: Callable[[ThreadState], StepListener],
        device_marks: DeviceMarks,
        switch: RecordingSwitch,
        fault: Callable[[], None],
        phase_log: PhaseLog | None = None,
    ) -> None:
        self.thread = threading.current_thread()
        self.ident = threading.get_ident()
        self.calls = CallStack(BackwardTimestamps(switch, fault), DeviceLog(device_marks))
        self.root = RootCall()
        self.exit_watch = ExitWatch()
        self.events = EventState()
        self.context = ContextState()
        self.scaling = Scaling()
        self.pending = PendingRecords()
        self.step_detector = StepDetector(make_listener(self))
        self.phase_log = phase_log if self.thread is threading.main_thread() else None
        self.read_in_closure = False
        """Gradient norms were read inside the optimizer's step that runs."""
        self.watched: list[PendingGradient] = []
        """Gradients of watched tensors since the last segment."""
        self.explicit_steps = 0
        """`torchotel.step()` blocks that are open, one in another."""

    def current(self) -> tuple[Identity, int] | None:
        """Return the identity and the start of the step or evaluation that is current; None for nothing."""
        root, events = self.root, self.events
        fetches = events.in_fetch > 0 and not root.in_forward
        if fetches and not (root.has_run or self.thread is threading.main_thread()):
            return None  # a thread that only prefetches: no step comes of it
        return self.step_detector.current(events.fetch_start_ns if fetches else None)

    def drain_into(self, segment: StepSegment) -> None:
        """Move the records since the last segment into the segment that ends."""
        self.calls.drain_into(segment)
        self.events.drain_into(segment)
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
        return any(thread.root.in_forward and thread.thread.ident != own for thread in list(self.all))

    def remove_ended(self) -> Iterator[ThreadState]:
        """Yield the state of each thread that has ended, once."""
        for thread in list(self.all):
            if thread.thread.is_alive():
                continue
            try:
                self.all.remove(thread)
            except KeyError:
                continue  # another thread has removed it
            self.forwarding.discard(thread)
            yield thread


class CurrentThread(threading.local):
    """The calling thread's state, as an attribute of a thread-local: the cheapest access for the hooks of every call.

    Args:
        new_thread: Makes the state of the calling thread.
    """

    def __init__(self, new_thread: Callable[[], ThreadState]) -> None:
        self.state = new_thread()
