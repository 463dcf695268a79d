"""The training threads' side, whole: hooks and seams in, finished steps out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter_ns

from torch.nn import Module

from torchotel._guard import Guard
from torchotel._records import ModelInfo, SpanReference, Unit
from torchotel.capture.calls import CallRecorder
from torchotel.capture.compiling import Compiling
from torchotel.capture.detail import Detail
from torchotel.capture.events import Events
from torchotel.capture.hooks import ModuleHooks
from torchotel.capture.outermost import Outermost
from torchotel.capture.parts import Part, join
from torchotel.capture.paths import Paths
from torchotel.capture.sites import Sites
from torchotel.capture.thread import ThreadState


class Capture:
    """Record training steps and evaluations of all threads and hand them over as plain records.

    Args:
        hand_over: Gets each finished step or evaluation, on the thread that ran it.
        detail: Which of them are recorded in detail.
        shapes: Whether shapes and dtypes are recorded.
        user_span: Answers with the user's span that is current on the calling thread.
    """

    def __init__(
        self,
        hand_over: Callable[[Unit], None],
        detail: Detail,
        *,
        shapes: bool = True,
        user_span: Callable[[], SpanReference | None] = lambda: None,
    ) -> None:
        self._hand_over, self.detail, self._user_span = hand_over, detail, user_span
        self._local = threading.local()
        self.threads: set[ThreadState] = set()
        self.forwarding: set[ThreadState] = set()  # those that have run a forward
        self.guard = Guard("capture", off=self.uninstall)
        self.paths = Paths()
        self.numbers = {"step": 0, "evaluation": 0}
        self._numbering = threading.RLock()  # a signal's handler may end a step in the midst of it
        self.calls_dropped = 0
        self.model: ModelInfo | None = None
        self.outermost = outermost = Outermost(self)
        self.calls = CallRecorder(
            self.paths, Sites(shapes=shapes), self.thread, outermost.enter, outermost.leave, self.guard.fault
        )
        self.hooks = ModuleHooks(self.calls.before, self.calls.after, outermost.first, outermost.left)
        self.events = Events(self)
        self.compiling = Compiling(self.hooks, outermost.enter_region, self.paths.compiled, self.guard.guarded)
        self.installed = False
        """Whether anything is to be recorded; what was running when it ended may still call."""

    # ---- in and out

    def install(self) -> None:
        """Put hooks and seams in; they see the next event."""
        self.installed = True
        self.events.install()
        self.compiling.install()
        self.hooks.install()

    def uninstall(self) -> None:
        """Take everything out; steps that are open stay until `end`."""
        self.installed = False
        self.hooks.remove()
        self.compiling.uninstall()
        self.events.uninstall()
        for thread in list(self.threads):
            self.outermost.drop_exit_hook(thread)

    def detach(self) -> None:
        """Take everything out of a forked child."""
        self.hooks.renew_lock()
        self.uninstall()

    def flush(self) -> None:
        """Hand over what has ended on the calling thread."""
        thread = self.thread()
        self.outermost.settle(thread)
        thread.machine.hand_over_finished()
        self._retire_ended()

    def end(self) -> None:
        """Hand over what all threads hold, finished or not; to be called after `uninstall`."""
        for thread in list(self.threads):
            self.calls.close_interrupted(thread, perf_counter_ns(), live=0)
            thread.machine.end()

    def learn(self, model: Module) -> None:
        """Name the modules of a model before its first call."""
        self.paths.learn(model)
        self.compiling.learn(model)

    # ---- threads

    def thread(self) -> ThreadState:
        """Return the calling thread's state."""
        try:
            return self._local.state  # type: ignore[no-any-return] # threading.local holds anything
        except AttributeError:
            self._retire_ended()
            thread = self._local.state = ThreadState(self._emit, self._user_span)
            self.threads.add(thread)
            return thread

    def _retire_ended(self) -> None:
        """Hand over what threads have left that are gone: their last step waits for an event that never comes."""
        for thread in list(self.threads):
            if thread.thread.is_alive():
                continue
            try:
                self.threads.remove(thread)
            except KeyError:
                continue  # another thread hands it over
            self.forwarding.discard(thread)
            self.hooks.forget(thread)
            self.calls.close_interrupted(thread, perf_counter_ns(), live=0)
            thread.machine.end()

    # ---- hand-over

    def _emit(self, kind: str, parts: list[Part]) -> None:
        with self._numbering:
            number = self.numbers[kind]
            self.numbers[kind] = number + 1
        self._hand_over(join(kind, number, parts, self.detail.reason(number)))
