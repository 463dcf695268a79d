"""The functions that PyTorch calls around module calls and compiled regions.

While a step is recorded in detail, `before` and `after` run for each module call. Otherwise `on_root_forward_start`
sees the start of the next root call and `on_root_forward_end` its end. The hooks keep no tensor, return nothing and
never raise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from torch.compiler import is_dynamo_compiling
from torch.nn import Module

from torchotel._records import NO_CLOCK, Error, PhaseLog
from torchotel.capture.module_registry import ModuleState
from torchotel.capture.torch_internals import (
    COMPILING,
    compiler_flags,
    ending_call,
    graph_task,
    is_inside,
    runs_plainly,
    torch_function_modes,
    without_torch_function,
)

if TYPE_CHECKING:
    from torchotel._utils.faults import Guard
    from torchotel.capture.autograd_hooks import RecordingSwitch
    from torchotel.capture.exceptions import ErrorReader
    from torchotel.capture.module_calls import CallStack, Frame, ModuleCallRecorder
    from torchotel.capture.root_calls import RootCalls
    from torchotel.capture.thread_state import CurrentThread, ThreadState


MAX_CALLERS = 64


def _never_raises(hook: Callable[..., None]) -> Callable[..., None]:
    """Keep what a hook raises from the user's forward, and skip the hook while something is compiled or exported.

    The hooks of every module call do the same by themselves, since one more function for each call is measurable.
    """

    @wraps(hook)
    def call(self: ForwardHooks, module: Module, args: Any, *output: Any) -> None:
        if is_dynamo_compiling() or compiler_flags[COMPILING]:
            return
        try:
            hook(self, module, args, *output)
        except Exception as error:  # noqa: BLE001  # no internal error may reach the user's forward
            # The context is the exception of a forward that raised; PyTorch then iterates over its hooks.
            self._fault(iterated=bool(output) and error.__context__ is not None)

    return runs_plainly(call)


class ForwardHooks:
    """Pass the start and the end of module calls to the recorder, and those of root calls to `RootCalls`.

    Args:
        root_calls: Decides for each root call whether it is recorded.
        calls: Records calls.
        states: The state of each known module, by its `id()`.
        errors: Reads exceptions.
        current_thread: The calling thread's state.
        switch: Whether anything is recorded.
        guard: Counts internal errors.
    """

    def __init__(
        self,
        root_calls: RootCalls,
        calls: ModuleCallRecorder,
        states: dict[int, ModuleState],
        errors: ErrorReader,
        current_thread: CurrentThread,
        switch: RecordingSwitch,
        guard: Guard,
    ) -> None:
        self._root_calls, self._calls, self._states, self._errors = root_calls, calls, states, errors
        self._current_thread, self._switch, self._fault = current_thread, switch, guard.fault
        self._on_region_end = guard.guarded(self._region_ended)

    # ---- every call of a detailed step

    @runs_plainly
    def before(self, module: Module, args: Any) -> None:
        """Open a call; a global forward pre-hook."""
        if is_dynamo_compiling() or compiler_flags[COMPILING]:
            return
        try:
            thread = self._current_thread.state
            calls = thread.calls
            stack = calls.frames
            if stack:
                state = self._states.get(id(module))
                known = state is not None and id(stack[-1][0]) in state.callers and module is not stack[0][0]
                if not known and not self._may_open(thread, module, state):
                    return
            elif not self._root_calls.enter(thread, module):
                return
            if thread.phase_log is not None:
                self._note_running(thread.phase_log, module)
            self._calls.open(calls, module, args)
        except Exception:  # noqa: BLE001  # no internal error may reach the user's forward
            self._fault()

    @runs_plainly
    def after(self, module: Module, args: Any, *rest: Any) -> None:
        """Close a call; a global forward hook with `always_call` and `with_kwargs`.

        PyTorch passes (kwargs, output), or (None,) alone if the forward raised.
        """
        if is_dynamo_compiling():
            return
        end_ns = perf_counter_ns()  # the forward was just before
        if compiler_flags[COMPILING]:
            return
        try:
            thread = self._current_thread.state
            calls = thread.calls
            stack = calls.frames
            if not stack:
                return
            frame = stack.pop()
            if frame[0] is not module:
                found = self._unwind(calls, module, frame, end_ns)
                if found is None:
                    return
                frame = found
            slot = calls.device_log.call_ended(frame[3]) if frame[3] is not None else NO_CLOCK
            error = None
            if len(rest) == 1:
                error = self._calls.add_failed(calls, frame, args, end_ns, slot)
            elif torch_function_modes():
                with without_torch_function():  # a mode would be called for each property that is read
                    self._calls.add(calls, frame, args, rest[0], rest[1], end_ns, slot)
            else:
                self._calls.add(calls, frame, args, rest[0], rest[1], end_ns, slot)
            self._leave_call(thread, end_ns, error)
        except Exception:  # noqa: BLE001  # no internal error may reach the user's forward
            self._fault(iterated=len(rest) == 1)

    def _leave_call(self, thread: ThreadState, end_ns: int, error: Error | None) -> None:
        """Return to the call around one that has ended, or end the root call."""
        stack = thread.calls.frames
        if not stack:
            self._root_calls.leave(thread, end_ns, error)
        elif thread.phase_log is not None:
            self._note_running(thread.phase_log, stack[-1][0])

    def _note_running(self, phase_log: PhaseLog, module: Module) -> None:
        state = self._states.get(id(module))
        phase_log.note_module("" if state is None or state.skipped else state.path)

    def _may_open(self, thread: ThreadState, module: Module, state: ModuleState | None) -> bool:
        """Close the calls that an interrupt left open; return whether this call is to be recorded.

        Walking the Python stack is slow, so each module's callers are remembered.
        """
        stack = thread.calls.frames
        self._root_calls.close_interrupted_calls(thread, perf_counter_ns(), opening=1)
        if not stack:
            return self._root_calls.enter(thread, module)
        if state is not None:
            if len(state.callers) >= MAX_CALLERS:
                state.callers.clear()
            state.callers.add(id(stack[-1][0]))
        return True

    def _unwind(self, calls: CallStack, module: Module, frame: Frame, now_ns: int) -> Frame | None:
        """Return the frame of the call that ends, if it has one, and close those above it, which were interrupted."""
        if all(open_module is not module for open_module, *_ in calls.frames):
            calls.frames.append(frame)  # another pre-hook raised before this one ran
            return None
        while frame[0] is not module:
            self._calls.add_interrupted(calls, frame, now_ns)
            frame = calls.frames.pop()
        return frame

    # ---- root calls alone

    @_never_raises
    def on_root_forward_start(self, module: Module, args: Any) -> None:
        """See the first module call since the last event: a global forward pre-hook, the only one meanwhile."""
        thread = self._current_thread.state
        if thread.root.in_forward or thread.events.in_fetch or graph_task() != -1:
            return
        if not self._switch.open:  # capture ended while another hook of this call ran
            return
        if self._root_calls.enter(thread, module):
            self._calls.open(thread.calls, module, args)

    @_never_raises
    def on_root_forward_end(self, module: Module, args: Any, output: Any) -> None:
        """See the end of the root call: a forward hook of its module with `always_call`."""
        now_ns = perf_counter_ns()
        thread = self._current_thread.state
        if thread.exit_watch.module is None or thread.exit_watch.module() is not module:
            return  # the hook is on the module for another thread
        call, raised = ending_call()
        if call != thread.exit_watch.call and is_inside(thread.exit_watch.call):
            return  # a call of the module inside its own
        if not raised:  # else PyTorch reads the module's hooks: this one is removed at the next event
            self._root_calls.remove_exit_hook(thread)
        self._leave(thread, module, now_ns, sys.exception() if raised else None)

    # ---- compiled regions, which run no hooks

    def on_region_start(self, module: Module, args: Any) -> Callable[..., None] | None:
        """See the start of a region; return the hook that is to see its end."""
        thread = self._current_thread.state
        if thread.calls.frames:
            self.before(module, args)
            return self.after
        if thread.root.in_forward or thread.events.in_fetch or not self._switch.open:
            return None
        if self._root_calls.enter(thread, module, watch=False):
            self._calls.open(thread.calls, module, args)
            return self.after
        return self._on_region_end

    def _region_ended(self, module: Module, args: Any, *rest: Any) -> None:
        """See the end of a region that is a root call and is not recorded in detail; called as `after` is."""
        self._leave(self._current_thread.state, module, perf_counter_ns(), sys.exception() if len(rest) == 1 else None)

    def _leave(self, thread: ThreadState, module: Module, now_ns: int, exception: BaseException | None) -> None:
        """End the root call that runs without detail, if there is one."""
        if thread.root.in_forward:
            self._root_calls.leave(thread, now_ns, self._errors.read(exception, module))
