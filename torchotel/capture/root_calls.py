"""Outermost module calls: where steps, evaluations and compiled regions begin."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter_ns
from typing import TYPE_CHECKING

import torch
from torch.nn import Module
from torch.utils.data import get_worker_info

from torchotel._records import CallNote, Error, ModelInfo, ModuleCall
from torchotel.capture.call_signatures import info_of, is_training
from torchotel.capture.module_registry import ModuleLocation, ModuleRegistry, modules_of, unwrapped
from torchotel.capture.step_segment import StepSegment
from torchotel.capture.thread_state import MAX_CALLS, ThreadState
from torchotel.capture.torch_internals import (
    calls_in_progress,
    graph_task,
    innermost_call,
    is_generated,
    is_replica,
    is_traced,
    made_for_replica,
    node_of,
    optimizer_steps_in_progress,
    without_torch_function,
)

if TYPE_CHECKING:
    from torchotel._utils.faults import Warn
    from torchotel.capture.active_span import ActiveSpans
    from torchotel.capture.autograd_hooks import RecordingSwitch
    from torchotel.capture.cuda import DeviceMarks
    from torchotel.capture.hook_manager import ModuleHooks
    from torchotel.capture.module_calls import ModuleCallRecorder
    from torchotel.capture.thread_state import Threads
    from torchotel.sampling.detail import Detail


def join_forward(thread: ThreadState, replica: Module, threads: Iterable[ThreadState], paths: ModuleRegistry) -> bool:
    """Record a replica's call for the thread whose forward waits for it; False where no forward is recorded.

    Where it can't be told whose it is, it is counted as dropped, with all that it calls.
    """
    waiting = {other: other.stack[-1:] for other in threads if other.in_forward and other is not thread}
    if not any(waiting.values()):
        return False
    owners = [(other, frame[0]) for other, last in waiting.items() for frame in last if _holds_like(frame[0], replica)]
    if len(owners) != 1:
        thread.muted_from = len(thread.calls)
        return True
    owner, caller = owners[0]
    thread.owner = owner
    owner.unordered = thread.unordered = True  # numbers of nodes are each thread's own
    thread.backward.write_to_log_of(owner.backward)
    copies = (tensor for module in modules_of(replica) for tensor in made_for_replica(module))
    thread.backward.borders = {node for tensor in copies if (node := node_of(tensor)) is not None}
    _name(replica, unwrapped(caller), paths)
    return True


def beside(call: ModuleCall, lane: int) -> ModuleCall:
    """Mark a call that ran on another thread than what waited for it."""
    return call._replace(note=(call.note or CallNote())._replace(lane=lane))


def _holds_like(caller: Module, replica: Module) -> bool:
    """Tell whether a module is, or holds, one that the replica may be a copy of."""
    return any(type(module) is type(replica) for module in modules_of(caller))


def _name(replica: Module, original: Module, paths: ModuleRegistry) -> None:
    """Call a replica, and all below it, what their originals are called, whether what holds them lives on or not."""
    for copy, copied in zip(modules_of(replica), modules_of(original), strict=False):
        known = paths.states.get(id(copied))
        if known is None or type(copy) is not type(copied):
            return
        state = paths.add(copy, ModuleLocation(known.model, known.path, None, "", known.root))
        state.info, state.sites = info_of(known, copied), known.sites


NEVER_FORWARD = ("torchotel", "Otel")
"""How the names of threads begin that are ours or the SDK's."""

WHOSE_REPLICA = (
    "it can't be told to which forward the replicas of a %s belong: several threads forward such models, or none does. "
    "What they call is left out of the traces and counted (`calls_dropped` in stats()). Forwards of such models that "
    "run one after the other have it"
)
MANY_CALLS = (
    "a step has more than %d module calls: the others are left out of its trace and counted (`calls_dropped` in "
    "stats()). Where it is several steps, torchotel.step() says so; where nothing is trained, torch.no_grad() does"
)


class RootCalls:
    """Tell the step detector of forwards, and decide at each whether its calls are recorded.

    Args:
        threads: The states of all threads.
        calls: Records calls.
        hooks: Which hooks are in.
        paths: Names of modules.
        live: Makes the step current in the program's context.
        device_marks: Marks on the clocks of devices.
        switch: Counts the calls that are left out.
        numbers: How many steps and evaluations were handed over.
        detail: Which of them are recorded in detail.
        context: Returns what the current span belongs to: another object where that has changed.
        warn: Called with what the user is to know.
        in_data_worker: Called when a DataLoader's worker process runs a forward: it is not recorded.
    """

    def __init__(
        self,
        threads: Threads,
        calls: ModuleCallRecorder,
        hooks: ModuleHooks,
        paths: ModuleRegistry,
        live: ActiveSpans,
        device_marks: DeviceMarks,
        switch: RecordingSwitch,
        numbers: Mapping[str, int],
        detail: Detail,
        context: Callable[[], object],
        warn: Warn,
        in_data_worker: Callable[[], None],
    ) -> None:
        self._threads, self._calls, self._hooks, self._paths, self._live = threads, calls, hooks, paths, live
        self._device_marks, self._switch, self._numbers, self._detail = device_marks, switch, numbers, detail
        self._context, self._warn, self._in_data_worker = context, warn, in_data_worker
        self.model: ModelInfo | None = None
        """The model of the first root call."""

    def settle(self, thread: ThreadState) -> None:
        """Close what an interrupt left open, before the next event is taken in."""
        now_ns = perf_counter_ns()
        if thread.hooked is not None and not thread.in_forward:
            self.drop_exit_hook(thread)
        if thread.stack:
            self.close_interrupted(thread, now_ns)
        elif thread.in_forward and calls_in_progress() == 0:
            self.drop_exit_hook(thread)
            self.leave(thread, now_ns, None)

    def close_interrupted(self, thread: ThreadState, now_ns: int, *, opening: int = 0, live: int | None = None) -> None:
        """Close the calls that an interrupt left open, and the root call if it is one of them.

        Args:
            thread: The thread that runs this.
            now_ns: The time of the event that finds them.
            opening: Calls on the Python stack that are not open yet.
            live: How many calls are still running, where that is known.
        """
        if self._calls.close_interrupted(thread, now_ns, opening=opening, live=live):
            self.leave(thread, now_ns, None)

    def enter(self, thread: ThreadState, module: Module, *, watch: bool = True) -> bool:
        """Take in the start of an outermost call; return whether it is recorded in detail.

        Where it is not, its end is watched for, unless the caller sees to that.
        """
        if thread.in_forward or is_generated(module) or is_traced():
            return False  # inside an outermost call or region that is not recorded
        self.drop_exit_hook(thread)
        if graph_task() != -1 or is_replica(module):
            return self._enter_for_another(thread, module)
        if thread.in_fetch:
            thread.muted_from = len(thread.calls)
            return self._hooks.all_in
        if get_worker_info() is not None:  # a spawned worker ran the user's script again
            self._in_data_worker()
            return False
        detailed = self._forward_begins(thread, module)
        if self.model is None:
            with without_torch_function():
                self.model = self._paths.describe(module)
        self._paths.enter(module)  # also without detail: registrations need the names
        self._hooks.want(thread, detailed=detailed)
        if not detailed:  # other threads' hooks may go out before it ends
            thread.hooked_call = innermost_call()
            if not watch or self._hooks.watch_exit(thread, module):
                return False
            self._hooks.want(thread, detailed=True)
        if len(thread.calls) >= MAX_CALLS:
            thread.muted_from = len(thread.calls)
            self._warn(MANY_CALLS, MAX_CALLS)
        return True

    def goes_on(self, thread: ThreadState, module: Module) -> bool:
        """Take in a further forward of the open part where the rule has nothing to ask that it has not been told.

        There may be thousands, as in an episode of reinforcement learning. The module has run in this part with
        gradients on and in training mode, and the program's context is what it was.
        """
        part = thread.machine.forwarding
        if (
            part is None
            or part.detailed is not False
            or (known := part.models.get(id(module))) is None
            or known() is not module
            or id(module) in part.evaluated
            or not (is_training(module) and torch.is_grad_enabled())
            or part.context is not self._context()
            or thread.hooked is not None
            or is_traced()
        ):
            return False
        thread.hooked_call = innermost_call()
        alone = bool(module._modules) and thread.trains and len(self._threads.forwarding) == 1
        if not self._hooks.watch_exit(thread, module, alone=alone):
            return False
        thread.in_forward = thread.goes_on = True
        part.forwards += 1
        part.forwards_with_grad += 1
        part.forward_end_ns = part.end_ns = perf_counter_ns()
        return True

    def _enter_for_another(self, thread: ThreadState, module: Module) -> bool:
        """Record what runs inside a backward, or inside another thread's forward, where it belongs."""
        if graph_task() == -1:
            return self._join_forward(thread, module)
        self._recompute(thread)
        return self._hooks.all_in

    def _join_forward(self, thread: ThreadState, replica: Module) -> bool:
        joined = join_forward(thread, replica, list(self._threads.all), self._paths)
        if thread.muted_from is not None:
            self._warn(WHOSE_REPLICA, type(replica).__name__)
        return joined

    def _forward_begins(self, thread: ThreadState, module: Module) -> bool:
        """Tell the step machine; return whether the step is recorded in detail."""
        close_interrupted_optimizer(thread)
        grad = torch.is_grad_enabled()
        training = is_training(module)
        part = thread.machine.forward_begins(perf_counter_ns(), grad=grad, model=id(module), training=training)
        if grad:
            part.models[id(module)] = weakref.ref(module)
        thread.in_forward = thread.forwards = True
        self._device_marks.look()
        self._live.enter(thread, part, forward=True)
        part.context = self._context()
        self._threads.forwarding.add(thread)
        if len(self._threads.forwarding) == 1 and (thread.trains or _is_alone()):
            self._hooks.disarm()  # beside one that trains a thread's first forward may be missed, no other is
        if part.detailed is None or (grad and part.forwards_with_grad == 1 and not part.detailed):
            part.detailed = self._is_detailed(part, grad=grad)
        return part.detailed

    def _is_detailed(self, part: StepSegment, *, grad: bool) -> bool:
        numbers, detail = self._numbers, self._detail
        if grad or part.trained or part.explicit:
            return detail.of_step(numbers["step"] + part.ahead)
        return detail.of_evaluation(numbers["evaluation"])

    def leave(self, thread: ThreadState, now_ns: int, error: Error | None) -> None:
        """Take in the end of an outermost call."""
        if thread.in_forward and len(self._threads.all) > 1:
            self._end_replicas(thread, now_ns)
        if thread.goes_on:
            thread.goes_on = thread.in_forward = False
            thread.machine.forward_ends(now_ns, error)
            self._hooks.arm()
            return
        if thread.muted_from is not None:
            if not thread.in_fetch:
                self._switch.calls_dropped += len(thread.calls) - thread.muted_from
            del thread.calls[thread.muted_from :]
        if thread.owner is not None:
            lane = thread.thread.ident or 0  # not always the calling thread
            thread.owner.calls += [beside(call, lane) for call in thread.calls]
            thread.device_log.move(thread.owner.device_log)
            thread.calls.clear()
        forward = thread.in_forward
        thread.reset_call()
        if forward:
            self._live.leave_forward(thread)
            thread.machine.forward_ends(now_ns, error)
            if not thread.machine.in_step:
                self._live.leave_step(thread)
                if not self._detail.always:
                    self._hooks.release(thread)  # the thread of a server may idle for long
        self._hooks.arm()

    def _end_replicas(self, thread: ThreadState, now_ns: int) -> None:
        """Close the calls of replicas that were interrupted: their threads have no further event, and hold tensors."""
        for other in list(self._threads.all):
            if other.owner is thread:
                self.close_interrupted(other, now_ns, live=0)

    def _recompute(self, thread: ThreadState) -> None:
        """Record a forward that runs inside a backward for the thread that the backward belongs to."""
        thread.recompute = thread.unordered = True
        if not thread.in_backward:  # a thread of the autograd engine
            owners = [other for other in self._threads.all if other.in_backward]
            if len(owners) == 1:
                thread.owner = owners[0]
                thread.backward.write_to_log_of(owners[0].backward)
            else:
                thread.muted_from = len(thread.calls)

    def drop_exit_hook(self, thread: ThreadState) -> None:
        """Take the hook off the module whose end was watched for."""
        if thread.hooked is not None:
            self._hooks.unwatch_exit(thread, list(self._threads.forwarding))


def close_interrupted_optimizer(thread: ThreadState) -> None:
    """Close the steps of optimizers that raised where PyTorch did not show it."""
    if thread.machine.stepping and optimizer_steps_in_progress() == 0:
        thread.machine.abandon_stepping(perf_counter_ns())


def _is_alone() -> bool:
    """Tell whether no other Python thread is there that may call modules."""
    own = threading.current_thread()
    return all(one is own or one.name.startswith(NEVER_FORWARD) for one in threading.enumerate())
