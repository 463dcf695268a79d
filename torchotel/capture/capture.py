"""The training threads' side, whole: hooks and seams in, finished steps out."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn import Module

from torchotel._guard import Guard
from torchotel._records import Error, ModelInfo, SpanReference, Unit
from torchotel.capture.calls import CallRecorder, error_of
from torchotel.capture.compiling import Compiling
from torchotel.capture.detail import Detail
from torchotel.capture.events import Events
from torchotel.capture.hooks import ModuleHooks
from torchotel.capture.parts import Part, join
from torchotel.capture.paths import Paths
from torchotel.capture.seams import (
    called_because_forward_raised,
    calls_in_progress,
    graph_task,
    is_generated,
    is_traced,
    without_torch_function,
)
from torchotel.capture.sites import Sites
from torchotel.capture.thread import MOST_CALLS, ThreadState


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
        self._hand_over, self._detail, self._user_span = hand_over, detail, user_span
        self._local = threading.local()
        self.threads: set[ThreadState] = set()
        self._forwarding: set[ThreadState] = set()  # those that have run a forward
        self.guard = Guard("capture", off=self.uninstall)
        self.paths = Paths()
        self.numbers = {"step": 0, "evaluation": 0}
        self._numbering = threading.RLock()  # a signal's handler may end a step in the midst of it
        self.calls_dropped = 0
        self.model: ModelInfo | None = None
        self.calls = CallRecorder(
            self.paths, Sites(shapes=shapes), self.thread, self._enter, self._leave, self.guard.fault
        )
        self.hooks = ModuleHooks(self.calls.before, self.calls.after, self._first, self._left)
        self._events = Events(self)
        self.compiling = Compiling(self.hooks, self._enter_region, self.paths.compiled, self.guard.guarded)
        self.installed = False
        """Whether anything is to be recorded; what was running when it ended may still call."""

    # ---- in and out

    def install(self) -> None:
        """Put hooks and seams in; they see the next event."""
        self.installed = True
        self._events.install()
        self.compiling.install()
        self.hooks.install()

    def uninstall(self) -> None:
        """Take everything out; steps that are open stay until `end`."""
        self.installed = False
        self.hooks.remove()
        self.compiling.uninstall()
        self._events.uninstall()
        for thread in list(self.threads):
            self._drop_exit_hook(thread)

    def detach(self) -> None:
        """Take everything out of a forked child."""
        self.hooks.renew_lock()
        self.uninstall()

    def flush(self) -> None:
        """Hand over what has ended on the calling thread."""
        thread = self.thread()
        self.settle(thread)
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
            self._forwarding.discard(thread)
            self.hooks.forget(thread)
            self.calls.close_interrupted(thread, perf_counter_ns(), live=0)
            thread.machine.end()

    def settle(self, thread: ThreadState) -> None:
        """Close what an interrupt left open, before the next event is taken in."""
        now_ns = perf_counter_ns()
        if thread.exit_hook is not None and not thread.in_forward:
            self._drop_exit_hook(thread)
        if thread.stack:
            self.calls.close_interrupted(thread, now_ns)
        elif thread.in_forward and calls_in_progress() == 0:
            self._drop_exit_hook(thread)
            self._leave(thread, now_ns, None)

    # ---- outermost calls

    def _enter(self, thread: ThreadState, module: Module, *, watch: bool = True) -> bool:
        """Take in the start of an outermost call; return whether it is recorded in detail.

        Where it is not, its end is watched for, unless the caller sees to that.
        """
        if thread.in_forward or is_generated(module) or is_traced():
            return False  # inside an outermost call or region that is not recorded
        self._drop_exit_hook(thread)
        if graph_task() != -1:
            self._recompute(thread)
            return self.hooks.all_in
        if thread.in_fetch:
            thread.muted_from = len(thread.calls)
            return self.hooks.all_in
        if torch.utils.data.get_worker_info() is not None:  # a spawned worker ran the user's script again
            self.uninstall()
            return False
        detailed = self._forward_begins(thread)
        if self.model is None:
            with without_torch_function():
                self.model = self.paths.describe(module)
        if self.paths.enter(module):  # also without detail: registrations need the names
            self.compiling.learn(module)
        if not self.hooks.want(thread, detailed=detailed):
            thread.exit_depth = calls_in_progress() or 0
            if not watch or self.hooks.watch_exit(thread, module):
                return False
            self.hooks.want(thread, detailed=True)
        if len(thread.calls) >= MOST_CALLS:
            thread.muted_from = len(thread.calls)
        return True

    def _forward_begins(self, thread: ThreadState) -> bool:
        """Tell the step machine; return whether the step is recorded in detail."""
        self._events.settle_optimizer(thread)
        grad = torch.is_grad_enabled()
        part = thread.machine.forward_begins(perf_counter_ns(), grad=grad)
        thread.in_forward = True
        self._forwarding.add(thread)
        if len(self._forwarding) == 1:  # with several the one-shot stays, so that none misses its forward
            self.hooks.disarm()
        if part.detailed is None or (grad and part.forwards_with_grad == 1 and not part.detailed):
            kind = "step" if grad or part.trained else "evaluation"
            part.detailed = self._detail.of(self.numbers[kind] + (part.ahead if kind == "step" else 0))
        return part.detailed

    def _leave(self, thread: ThreadState, now_ns: int, error: Error | None) -> None:
        """Take in the end of an outermost call."""
        if thread.muted_from is not None:
            if not thread.in_fetch:
                self.calls_dropped += len(thread.calls) - thread.muted_from
            del thread.calls[thread.muted_from :]
        if thread.owner is not None:
            thread.owner.calls += thread.calls
            thread.calls.clear()
        forward = thread.in_forward
        thread.reset_call()
        if forward:
            thread.machine.forward_ends(now_ns, error)
        self.hooks.arm()

    def _recompute(self, thread: ThreadState) -> None:
        """Record a forward that runs inside a backward for the thread that the backward belongs to."""
        thread.recompute = thread.unordered = True
        if not thread.in_backward:  # a thread of the autograd engine
            owners = [other for other in self.threads if other.in_backward]
            if len(owners) == 1:
                thread.owner = owners[0]
                thread.backward.log = owners[0].backward.log
            else:
                thread.muted_from = len(thread.calls)

    def _first(self, module: Module, args: Any) -> None:
        """See the first module call since the last event, with no other hook in."""
        if is_compiling():
            return
        try:
            thread = self.thread()
            if thread.in_forward or thread.in_fetch or graph_task() != -1 or is_generated(module):
                return
            if not self.installed:  # it ended while another of this call's hooks ran
                return
            if self._enter(thread, module):
                self.calls.open(thread, module)
        except Exception:  # noqa: BLE001  # nothing of ours may reach the user's forward
            self.guard.fault()

    def _left(self, module: Module, args: Any, output: Any) -> None:
        """See the end of an outermost call, with no other hook in."""
        if is_compiling():
            return
        now_ns = perf_counter_ns()
        try:
            thread = self.thread()
            if (calls_in_progress() or 0) > thread.exit_depth:
                return  # a call of the module inside its own
            error = None
            if called_because_forward_raised():  # its dictionary is being read: the hook goes at the next event
                exception = sys.exc_info()[1]
                error = error_of(exception) if exception is not None else None
            else:
                self._drop_exit_hook(thread)
            if thread.in_forward:
                self._leave(thread, now_ns, error)
        except Exception:  # noqa: BLE001  # nothing of ours may reach the user's forward
            self.guard.fault()

    def _enter_region(self, module: Module, args: Any) -> Callable[..., None] | None:
        """See the start of a region that runs no hooks; return what is to see its end."""
        try:
            thread = self.thread()
            if thread.stack:
                self.calls.before(module, args)
                return self.calls.after
            if thread.in_forward or thread.in_fetch or not self.installed:
                return None
            if self._enter(thread, module, watch=False):
                self.calls.open(thread, module)
                return self.calls.after
        except Exception:  # noqa: BLE001  # nothing of ours may reach the user's forward
            self.guard.fault()
            return None
        return self._leave_region

    def _leave_region(self, module: Module, args: Any, *rest: Any) -> None:
        """See the end of an outermost region whose step is not recorded in detail."""
        exception = sys.exception() if len(rest) == 1 else None
        try:
            thread = self.thread()
            if thread.in_forward:
                error = error_of(exception) if exception is not None else None
                self._leave(thread, perf_counter_ns(), error)
        except Exception:  # noqa: BLE001  # nothing of ours may reach the user's forward
            self.guard.fault()

    @staticmethod
    def _drop_exit_hook(thread: ThreadState) -> None:
        if thread.exit_hook is not None:
            thread.exit_hook.remove()
            thread.exit_hook = None

    # ---- hand-over

    def _emit(self, kind: str, parts: list[Part]) -> None:
        with self._numbering:
            number = self.numbers[kind]
            self.numbers[kind] = number + 1
        self._hand_over(join(kind, number, parts, self._detail.reason(number)))
