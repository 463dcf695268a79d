"""The global module hooks: every call of every module, while a step is recorded in detail.

These hooks run for each module call of the user's program. They keep no tensor, return nothing, never raise,
and do nothing but take a time, compare what the call looked like with the module's last one, and append a record.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Module

from torchotel._records import NO_CLOCK, NO_SLOTS, CallNote, Error, ModuleCall, Slots
from torchotel.capture.call_signatures import CallSignatures, tensors_in
from torchotel.capture.module_registry import ModuleRegistry, ModuleState
from torchotel.capture.torch_internals import (
    COMPILING,
    calls_in_progress,
    compiler_flags,
    runs_plainly,
    sequence_number,
    torch_function_modes,
    without_torch_function,
)

if TYPE_CHECKING:
    from torchotel._records import CallSignature
    from torchotel.capture.cuda import DeviceMarks
    from torchotel.capture.exceptions import ErrorReader
    from torchotel.capture.thread_state import CurrentThread, Frame, ThreadState


INTERRUPTED = CallNote(estimated="end")
RECOMPUTED = CallNote(recompute=True)
MAX_CALLERS = 64

Note = TypeVar("Note", CallNote, CallNote | None)

_new = cast("Callable[[type[ModuleCall], tuple[Any, ...]], ModuleCall]", tuple.__new__)
_is_grad_enabled = torch.is_grad_enabled
_next_number = sequence_number or (lambda: 0)


class ModuleCallRecorder:
    """Turn the pre- and post-hook of module calls into records on the thread's state.

    Args:
        paths: Names of modules.
        sites: What calls look like.
        errors: Reads exceptions.
        device_marks: Marks on the clocks of devices.
        here: The calling thread's state.
        enter: Called before an outermost call; False where the call is not to be recorded.
        leave: Called after it.
        fault: Called for an internal error, in its `except` block, with whether PyTorch reads its hooks meanwhile.
    """

    def __init__(
        self,
        paths: ModuleRegistry,
        sites: CallSignatures,
        errors: ErrorReader,
        device_marks: DeviceMarks,
        here: CurrentThread,
        enter: Callable[[ThreadState, Module], bool],
        leave: Callable[[ThreadState, int, Error | None], None],
        fault: Callable[..., None],
    ) -> None:
        self._paths, self._sites, self._errors, self._here = paths, sites, errors, here
        self._device_marks = device_marks
        self._enter, self._leave, self._fault = enter, leave, fault
        self._states = paths.states

    @runs_plainly
    def before(self, module: Module, args: Any) -> None:
        """Open a call; a global forward pre-hook."""
        if is_dynamo_compiling() or compiler_flags[COMPILING]:
            return
        try:
            thread = self._here.thread
            stack = thread.stack
            if stack:
                state = self._states.get(id(module))
                known = state is not None and id(stack[-1][0]) in state.callers and module is not stack[0][0]
                if not known and not self._may_open(thread, module, state):
                    return
            elif not self._enter(thread, module):
                return
            self.open(thread, module, args)
        except Exception:  # noqa: BLE001  # nothing of ours may reach the user's forward
            self._fault()

    @runs_plainly
    def after(self, module: Module, args: Any, *rest: Any) -> None:
        """Close a call; a global forward hook with `always_call` and `with_kwargs`.

        PyTorch calls it with (kwargs, output), and where the forward raised with (None,) alone.
        """
        if is_dynamo_compiling():
            return
        end_ns = perf_counter_ns()  # the forward was just before
        if compiler_flags[COMPILING]:
            return
        try:
            thread = self._here.thread
            stack = thread.stack
            if not stack:
                return
            frame = stack.pop()
            if frame[0] is not module:
                found = self._unwind(thread, module, frame, end_ns)
                if found is None:
                    return
                frame = found
            slot = thread.device_log.call_ended(frame[3]) if frame[3] is not None else NO_CLOCK
            error = None
            if len(rest) == 1:
                error = self._add_failed(thread, frame, args, end_ns, slot)
            elif torch_function_modes():
                with without_torch_function():  # it would be called for each property that we read
                    self._add(thread, frame, args, rest[0], rest[1], end_ns, slot)
            else:
                self._add(thread, frame, args, rest[0], rest[1], end_ns, slot)
            if not stack:
                self._leave(thread, end_ns, error)
        except Exception:  # noqa: BLE001  # nothing of ours may reach the user's forward
            self._fault(iterated=len(rest) == 1)

    def open(self, thread: ThreadState, module: Module, args: Any) -> None:
        """Open a call that is to be recorded."""
        marks = self._device_marks
        mark = marks.begin(module, args) if marks.on else None
        thread.stack.append((module, _next_number(), perf_counter_ns(), mark))  # the time last: the forward is next

    def close_interrupted(self, thread: ThreadState, now_ns: int, *, opening: int = 0, live: int | None = None) -> None:
        """Close the calls that an interrupt left open, as far as the Python stack shows.

        Args:
            thread: The thread that runs this.
            now_ns: The time of the event that finds them.
            opening: Calls on the Python stack that are not open yet.
            live: How many calls are still running, where that is known.
        """
        if live is None and (live := calls_in_progress()) is None:
            return
        while len(thread.stack) > max(0, live - opening):
            self._add_interrupted(thread, thread.stack.pop(), now_ns)
            if not thread.stack:
                self._leave(thread, now_ns, None)

    def shown_path(self, thread: ThreadState, module: Module) -> str | None:
        """Return the path of an open call's module; None for one whose calls are left out."""
        state = self._state_of(thread, module)
        return None if state.skipped else state.path

    @staticmethod
    def _with_id(thread: ThreadState, frame: Frame, note: Note) -> CallNote | Note:
        """Note the id that was given out while the call ran."""
        given = thread.given_ids.pop(id(frame), None)
        return note if given is None else (note or CallNote())._replace(span_id=given.span_id)

    def _may_open(self, thread: ThreadState, module: Module, state: ModuleState | None) -> bool:
        """Close what an interrupt left open, and tell whether this call is to be recorded.

        Looks at the Python stack, so each module remembers by whom it was called.
        """
        stack = thread.stack
        self.close_interrupted(thread, perf_counter_ns(), opening=1)
        if not stack:
            return self._enter(thread, module)
        if state is not None:
            if len(state.callers) >= MAX_CALLERS:
                state.callers.clear()
            state.callers.add(id(stack[-1][0]))
        return True

    # ---- records

    def _state_of(self, thread: ThreadState, module: Module) -> ModuleState:
        state = self._states.get(id(module))
        if state is not None:
            holder = state.holder
            if holder is None:
                return state
            held = h._modules if (h := holder()) is not None else {}
            if state.name in held and held[state.name] is module:  # a scripted module's dictionary has no `get`
                return state
        return self._paths.find(module, [frame[0] for frame in thread.stack])

    def _add(
        self, thread: ThreadState, frame: Frame, args: Any, kwargs: Any, output: Any, end_ns: int, slot: int
    ) -> None:
        module, _, start_ns, _ = frame
        thread.backward.on_device = thread.device_log.stamp if slot != NO_CLOCK else None
        state = self._state_of(thread, module)
        found = self._look_at_one(thread, state, frame, args, kwargs, output)
        if found is None:
            with without_torch_function():  # subclasses of Tensor may have their own
                found = self._look_closely(thread, state, frame, args, kwargs, output)
        site, starts, ends = found
        if not state.skipped:
            note = RECOMPUTED if thread.recompute else None
            if thread.given_ids:
                note = self._with_id(thread, frame, note)
            thread.calls.append(_new(ModuleCall, (site, start_ns, end_ns, starts, ends, note, slot)))

    def _look_at_one(
        self, thread: ThreadState, state: ModuleState, frame: Frame, args: Any, kwargs: Any, output: Any
    ) -> tuple[CallSignature, Slots, Slots] | None:
        """Take in a call of one tensor in and one out, as nearly all are; None for any other.

        Where all that is asked of it is as it was in the module's last call, nothing is built.
        """
        if type(output) is not Tensor or kwargs or len(args) != 1 or type(tensor := args[0]) is not Tensor:
            return None
        if sequence_number is None:
            return None
        module, first, _, _ = frame
        try:
            node = output.grad_fn
            looks = (
                output.shape,
                tensor.shape,
                output.dtype,
                tensor.dtype,
                output.get_device(),
                node is None,
                tensor.requires_grad,
                module.training,
                _is_grad_enabled(),
            )
        except (RuntimeError, AttributeError):
            return None  # nested tensors have no shape, a view whose base changed has no node, a frozen script no mode
        last = state.last
        if last is not None and last[0] == looks:
            site = last[1]
        else:
            site = self._sites.find(state, module, [tensor], [output])
            state.last = looks, site
        if site.device is not thread.device:
            self._note_device(thread, site)
        if node is None:
            return site, NO_SLOTS, NO_SLOTS
        if thread.unordered:
            return site, *thread.backward.hook_unordered([output], [tensor], first)
        return site, *thread.backward.hook_one(output, node, first, state)

    def _look_closely(
        self, thread: ThreadState, state: ModuleState, frame: Frame, args: Any, kwargs: Any, output: Any
    ) -> tuple[CallSignature, Slots, Slots]:
        module, first, _, _ = frame
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(output)
        site = self._sites.find(state, module, inputs, outputs)
        self._note_device(thread, site)
        if sequence_number is None:
            return site, *thread.backward.hook_leaf(outputs)
        if thread.unordered or len({t.device for t in (*inputs, *outputs)}) > 1:
            return site, *thread.backward.hook_unordered(outputs, inputs, first)
        return site, *thread.backward.hook_many(outputs, first, state)

    @staticmethod
    def _note_device(thread: ThreadState, site: CallSignature) -> None:
        """Nodes of several devices run on several threads: from the second device on, order is not given."""
        if site.device is not thread.device:
            if thread.device is not None:
                thread.unordered = True
            thread.device = site.device

    def _add_failed(self, thread: ThreadState, frame: Frame, args: Any, end_ns: int, slot: int) -> Error | None:
        module, _, start_ns, _ = frame
        exception = sys.exc_info()[1]
        error = self._errors.read(exception, module)
        state = self._state_of(thread, module)
        with without_torch_function():
            site = self._sites.find(state, module, tensors_in(args), [])
        note = self._with_id(thread, frame, CallNote(error, recompute=thread.recompute))
        thread.calls.append(ModuleCall(site, start_ns, end_ns, NO_SLOTS, NO_SLOTS, note, slot))
        return error

    def _add_interrupted(self, thread: ThreadState, frame: Frame, now_ns: int) -> None:
        module, _, start_ns, _ = frame
        site = self._sites.unseen(self._state_of(thread, module), module)
        note = self._with_id(thread, frame, INTERRUPTED)
        thread.calls.append(ModuleCall(site, start_ns, now_ns, NO_SLOTS, NO_SLOTS, note))

    def _unwind(self, thread: ThreadState, module: Module, frame: Frame, now_ns: int) -> Frame | None:
        """Find the call that ends; those above it were interrupted. None where it was never opened."""
        if all(open_module is not module for open_module, *_ in thread.stack):
            thread.stack.append(frame)  # another's pre-hook raised before ours ran
            return None
        while frame[0] is not module:
            self._add_interrupted(thread, frame, now_ns)
            frame = thread.stack.pop()
        return frame
