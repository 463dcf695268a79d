"""Records of module calls.

The recorder runs for each module call of a step that is recorded in detail. It keeps no tensor. It compares what the
call looked like with the module's last call, and appends a record to the thread's state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Module

from torchotel._records import NO_CLOCK, NO_SLOTS, CallNote, Error, ModuleCall, Slots, SpanReference
from torchotel.capture.call_signatures import CallSignatures, tensors_in
from torchotel.capture.cuda import Mark
from torchotel.capture.module_registry import ModuleRegistry, ModuleState
from torchotel.capture.torch_internals import (
    calls_in_progress,
    sequence_number,
    without_torch_function,
)

if TYPE_CHECKING:
    from torchotel._records import CallSignature
    from torchotel.capture.autograd_hooks import BackwardTimestamps
    from torchotel.capture.cuda import DeviceLog, DeviceMarks
    from torchotel.capture.exceptions import ErrorReader
    from torchotel.capture.step_segment import StepSegment


INTERRUPTED = CallNote(estimated="end")
RECOMPUTED = CallNote(recompute=True)

Note = TypeVar("Note", CallNote, CallNote | None)

_new = cast("Callable[[type[ModuleCall], tuple[Any, ...]], ModuleCall]", tuple.__new__)
_is_grad_enabled = torch.is_grad_enabled
_next_number = sequence_number or (lambda: 0)


Frame: TypeAlias = tuple[Module, int, int, Mark | None]
"""An open call: the module, the sequence number of the first node that it can make, its start, also on its device."""


class CallStack:
    """The open calls of one thread, and the records of those that have ended since the last segment.

    Args:
        backward: Hooks the nodes of calls.
        device_log: The calls' times on devices.
    """

    __slots__ = ("backward", "device", "device_log", "frames", "note", "records", "reserved_ids", "unordered")

    def __init__(self, backward: BackwardTimestamps, device_log: DeviceLog) -> None:
        self.frames: list[Frame] = []
        self.records: list[ModuleCall] = []
        self.backward, self.device_log = backward, device_log
        self.unordered = False
        """Nodes of the root call that runs need not run in the order of their numbers."""
        self.device: str | None = None
        self.note: CallNote | None = None
        """The note of the calls inside a root call that is a recomputation or a forward of a pipeline's stage."""
        self.reserved_ids: dict[int, SpanReference] = {}
        """Ids that were fixed for open calls, by the `id()` of their frame."""

    def begin_inside(self, other: CallStack | None, *, recomputes: bool) -> None:
        """Begin a root call inside another thread's backward or forward, or inside a backward of this thread.

        Numbers of nodes are each thread's own, and those of a recomputation are not in order either.

        Args:
            other: The calls of that thread; None for this thread's own or an unknown one.
            recomputes: Whether the root call is a recomputation.
        """
        self.unordered = True
        if recomputes:
            self.note = RECOMPUTED
        if other is not None:
            self.backward.write_to_log_of(other.backward)
            if not recomputes:
                other.unordered = True

    def end_root_call(self) -> None:
        """Reset the state of one root call."""
        self.unordered, self.device, self.note = False, None, None
        if self.reserved_ids:
            self.reserved_ids.clear()
        if self.backward.starts:
            self.backward.clear()

    def move_to(self, other: CallStack, lane: int) -> None:
        """Hand the records to the thread that waits for them.

        Args:
            other: The calls of that thread.
            lane: The id of the thread that ran them.
        """
        other.records += [_with_lane(call, lane) for call in self.records]
        self.device_log.move(other.device_log)
        self.records.clear()
        self.backward = self.backward.another()

    def drain_into(self, segment: StepSegment) -> None:
        """Move the records since the last segment into the segment that ends."""
        timestamps = self.backward.log.timestamps
        device_times = self.device_log.drain()
        if segment.detailed:
            segment.calls, segment.timestamps, segment.device_times = (
                self.records.copy(),
                timestamps.copy(),
                device_times,
            )
        elif device_times is not None:
            device_times.drop()
        if self.records:
            self.records.clear()
        if timestamps:
            timestamps.clear()


def _with_lane(call: ModuleCall, lane: int) -> ModuleCall:
    """Mark a call that ran on another thread than the forward that waited for it."""
    return call._replace(note=(call.note or CallNote())._replace(lane=lane))


class ModuleCallRecorder:
    """Turn the start and the end of module calls into records on the thread's state.

    Args:
        registry: The modules' states and names.
        signatures: Finds the signature of a call.
        errors: Reads exceptions.
        device_marks: Records events on devices.
    """

    def __init__(
        self,
        registry: ModuleRegistry,
        signatures: CallSignatures,
        errors: ErrorReader,
        device_marks: DeviceMarks,
    ) -> None:
        self._registry, self._signatures, self._errors = registry, signatures, errors
        self._device_marks = device_marks
        self._states = registry.states

    def open(self, calls: CallStack, module: Module, args: Any) -> None:
        """Open a call that is to be recorded."""
        marks = self._device_marks
        mark = marks.begin(module, args) if marks.on else None
        calls.frames.append((module, _next_number(), perf_counter_ns(), mark))  # the time last: the forward is next

    def close_interrupted(self, calls: CallStack, now_ns: int, *, opening: int = 0, running: int | None = None) -> bool:
        """Close the calls that an interrupt left open, as far as the Python stack shows; return whether all are closed.

        Args:
            calls: Those of the calling thread.
            now_ns: The time of the event that finds them.
            opening: Calls on the Python stack that are not open yet.
            running: How many calls are still running; None to count them on the Python stack.
        """
        if running is None and (running := calls_in_progress()) is None:
            return False
        was_open = bool(calls.frames)
        while len(calls.frames) > max(0, running - opening):
            self.add_interrupted(calls, calls.frames.pop(), now_ns)
        return was_open and not calls.frames

    def shown_path(self, calls: CallStack, module: Module) -> str | None:
        """Return the path of an open call's module; None for a module whose calls are not recorded."""
        state = self._state_of(calls, module)
        return None if state.skipped else state.path

    @staticmethod
    def _with_id(calls: CallStack, frame: Frame, note: Note) -> CallNote | Note:
        """Add the span id that was fixed while the call ran to its note."""
        given = calls.reserved_ids.pop(id(frame), None)
        return note if given is None else (note or CallNote())._replace(span_id=given.span_id)

    # ---- records

    def _state_of(self, calls: CallStack, module: Module) -> ModuleState:
        state = self._states.get(id(module))
        if state is not None:
            holder = state.holder
            if holder is None:
                return state
            held = h._modules if (h := holder()) is not None else {}
            if state.name in held and held[state.name] is module:  # a scripted module's dictionary has no `get`
                return state
        return self._registry.find(module, [frame[0] for frame in calls.frames])

    def add(self, calls: CallStack, frame: Frame, args: Any, kwargs: Any, output: Any, end_ns: int, slot: int) -> None:
        """Append the record of a call that has returned.

        Args:
            calls: Those of the calling thread.
            frame: The open call.
            args: The positional arguments.
            kwargs: The keyword arguments.
            output: The result.
            end_ns: When the call ended.
            slot: The slot of its time on the device; `NO_CLOCK` for none.
        """
        module, _, start_ns, _ = frame
        calls.backward.on_device = calls.device_log.stamp if slot != NO_CLOCK else None
        state = self._state_of(calls, module)
        found = self._inspect_single_tensor(calls, state, frame, args, kwargs, output)
        if found is None:
            with without_torch_function():  # subclasses of Tensor may have their own
                found = self._inspect_tensors(calls, state, frame, args, kwargs, output)
        signature, starts, ends = found
        if not state.skipped:
            note = calls.note
            if calls.reserved_ids:
                note = self._with_id(calls, frame, note)
            calls.records.append(_new(ModuleCall, (signature, start_ns, end_ns, starts, ends, note, slot)))

    def _inspect_single_tensor(
        self, calls: CallStack, state: ModuleState, frame: Frame, args: Any, kwargs: Any, output: Any
    ) -> tuple[CallSignature, Slots, Slots] | None:
        """Inspect a call with one tensor in and one out, as nearly all are; return None for any other call.

        If the call looks as the module's last call did, no object is built.
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
            return None  # a nested tensor has no shape, a view with a changed base no node, a frozen script no mode
        last = state.seen.last
        if last is not None and last[0] == looks:
            signature = last[1]
        else:
            signature = self._signatures.find_for_tensor(state, module, tensor, output, looks)
        if signature.device is not calls.device:
            self._note_device(calls, signature)
        if node is None:
            return signature, NO_SLOTS, NO_SLOTS
        if calls.unordered:
            return signature, *calls.backward.hook_boundary_nodes([output], [tensor], first)
        return signature, *calls.backward.hook_single_output(output, node, first, state.nodes)

    def _inspect_tensors(
        self, calls: CallStack, state: ModuleState, frame: Frame, args: Any, kwargs: Any, output: Any
    ) -> tuple[CallSignature, Slots, Slots]:
        module, first, _, _ = frame
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(output)
        signature = self._signatures.find(state, module, inputs, outputs)
        self._note_device(calls, signature)
        if sequence_number is None:
            return signature, *calls.backward.hook_output_nodes(outputs)
        if calls.unordered or len({t.device for t in (*inputs, *outputs)}) > 1:
            return signature, *calls.backward.hook_boundary_nodes(outputs, inputs, first)
        return signature, *calls.backward.hook_outputs(outputs, first, state.nodes)

    @staticmethod
    def _note_device(calls: CallStack, signature: CallSignature) -> None:
        """Note the call's device: nodes of several devices run on several threads, in no given order."""
        if signature.device is not calls.device:
            if calls.device is not None:
                calls.unordered = True
            calls.device = signature.device

    def add_failed(self, calls: CallStack, frame: Frame, args: Any, end_ns: int, slot: int) -> Error | None:
        """Append the record of a call that raised; return the error."""
        module, _, start_ns, _ = frame
        exception = sys.exc_info()[1]
        error = self._errors.read(exception, module)
        state = self._state_of(calls, module)
        with without_torch_function():
            signature = self._signatures.find(state, module, tensors_in(args), [])
        note = self._with_id(calls, frame, (calls.note or CallNote())._replace(error=error))
        calls.records.append(ModuleCall(signature, start_ns, end_ns, NO_SLOTS, NO_SLOTS, note, slot))
        return error

    def add_interrupted(self, calls: CallStack, frame: Frame, now_ns: int) -> None:
        """Append the record of a call that an interrupt has ended, with an estimated end."""
        module, _, start_ns, _ = frame
        signature = self._signatures.unseen(self._state_of(calls, module), module)
        note = self._with_id(calls, frame, INTERRUPTED)
        calls.records.append(ModuleCall(signature, start_ns, now_ns, NO_SLOTS, NO_SLOTS, note))
