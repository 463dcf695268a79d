"""Root calls: the module calls that no other call encloses, which begin steps and evaluations."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter_ns
from typing import TYPE_CHECKING

import torch
from torch.nn import Module
from torch.utils.data import get_worker_info

from torchotel._limits import MAX_STEP_CALLS, MAX_UNTRAINED_FORWARDS
from torchotel._records import SUPPRESSED, Error, ModelInfo
from torchotel.capture.call_signatures import info_of, is_training
from torchotel.capture.module_registry import ModuleLocation, ModuleRegistry, modules_of, unwrapped
from torchotel.capture.step_segment import StepSegment
from torchotel.capture.torch_internals import (
    backwards_in_progress,
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
    from torchotel.capture.gradient_buckets import GradientBuckets
    from torchotel.capture.gradient_norms import Gradients
    from torchotel.capture.hook_manager import ModuleHooks
    from torchotel.capture.module_calls import ModuleCallRecorder
    from torchotel.capture.thread_state import Threads, ThreadState
    from torchotel.sampling.detail import Detail


def join_waiting_forward(
    thread: ThreadState, replica: Module, threads: Iterable[ThreadState], registry: ModuleRegistry
) -> bool:
    """Record a replica's call for the thread whose forward waits for it; return False if no forward is recorded.

    If its thread is ambiguous, the call and all calls inside it are counted as dropped.
    """
    waiting = {other: other.calls.frames[-1:] for other in threads if other.root.in_forward and other is not thread}
    if not any(waiting.values()):
        return False
    owners = [(other, frame[0]) for other, last in waiting.items() for frame in last if _holds_like(frame[0], replica)]
    if len(owners) != 1:
        thread.root.dropped_from = len(thread.calls.records)
        return True
    owner, caller = owners[0]
    thread.root.owner = owner
    thread.calls.begin_inside(owner.calls, recomputes=False)
    copies = (tensor for module in modules_of(replica) for tensor in made_for_replica(module))
    thread.calls.backward.borders = {node for tensor in copies if (node := node_of(tensor)) is not None}
    _name_replica(replica, unwrapped(caller), registry)
    return True


def _holds_like(caller: Module, replica: Module) -> bool:
    """Return whether the replica may be a copy of a module or of a submodule."""
    return any(type(module) is type(replica) for module in modules_of(caller))


def _name_replica(replica: Module, original: Module, registry: ModuleRegistry) -> None:
    """Give a replica and its submodules the names of their originals."""
    for copy, copied in zip(modules_of(replica), modules_of(original), strict=False):
        known = registry.states.get(id(copied))
        if known is None or type(copy) is not type(copied):
            return
        state = registry.add(copy, ModuleLocation(known.model, known.path, None, "", known.root))
        info_of(known, copied)
        state.seen = known.seen.of_replica()


NEVER_FORWARD = ("torchotel", "Otel")
"""Prefixes of the names of torchotel's threads and the SDK's."""

WHOSE_REPLICA = (
    "The replicas of a %s belong to an unknown forward, because several threads run such models, or none does. Their "
    "module calls are left out of the traces and counted (`calls_dropped` in stats()). Run the forwards of such models "
    "one after the other"
)
MANY_CALLS = (
    "A step has more than %d module calls: further ones are left out of its trace and counted (`calls_dropped` in "
    "stats()). Mark the steps with torchotel.step(), or use torch.no_grad() if nothing is trained"
)


class RootCall:
    """The root call that runs on one thread."""

    __slots__ = ("dropped_from", "has_run", "in_forward", "is_recomputation", "owner")

    def __init__(self) -> None:
        self.in_forward = False
        """Whether a forward of the thread's own step or evaluation runs."""
        self.is_recomputation = False
        self.dropped_from: int | None = None
        """The index of the first call that is not to be kept, such as those of transforms inside a fetch."""
        self.owner: ThreadState | None = None
        """The thread whose forward or backward the call belongs to, if the call runs on another thread."""
        self.has_run = False
        """Whether a forward of a step or an evaluation has run on the thread."""

    def end(self) -> None:
        """End the root call."""
        self.in_forward = self.is_recomputation = False
        self.dropped_from = self.owner = None


class RootCalls:
    """Begin and end root calls, and decide for each whether its calls are recorded.

    Args:
        threads: The states of all threads.
        calls: Records calls.
        hooks: Which hooks are in.
        registry: Names of modules.
        active_spans: Attaches the step to the program's context.
        gradients: Takes gradient norms.
        buckets: Reads the buckets of DistributedDataParallel.
        device_marks: Marks on the clocks of devices.
        switch: Counts the calls that are left out.
        numbers: How many steps and evaluations were recorded.
        detail: Which steps and evaluations are recorded in detail.
        warn: Logs a warning once.
        in_data_worker: Called when a DataLoader's worker process runs a forward, which is not recorded.
    """

    def __init__(
        self,
        threads: Threads,
        calls: ModuleCallRecorder,
        hooks: ModuleHooks,
        registry: ModuleRegistry,
        active_spans: ActiveSpans,
        gradients: Gradients,
        buckets: GradientBuckets,
        device_marks: DeviceMarks,
        switch: RecordingSwitch,
        numbers: Mapping[str, int],
        detail: Detail,
        warn: Warn,
        in_data_worker: Callable[[], None],
    ) -> None:
        self._threads, self._calls, self._hooks, self._registry, self._active_spans = (
            threads,
            calls,
            hooks,
            registry,
            active_spans,
        )
        self._device_marks, self._switch, self._numbers, self._detail = device_marks, switch, numbers, detail
        self._gradients, self._buckets = gradients, buckets
        self._warn, self._in_data_worker = warn, in_data_worker
        self.model: ModelInfo | None = None
        """The model of the first root call."""

    def close_interrupted(self, thread: ThreadState, *, opening_backwards: int = 0) -> None:
        """Close the calls and backwards that an interrupt left open, before the next event is recorded.

        Args:
            thread: The thread that runs this.
            opening_backwards: Backwards on the Python stack that are not open yet.
        """
        close_interrupted_backward(thread, opening=opening_backwards)
        now_ns = perf_counter_ns()
        if thread.exit_watch.module is not None and not thread.root.in_forward:
            self.remove_exit_hook(thread)
        if thread.calls.frames:
            self.close_interrupted_calls(thread, now_ns)
        elif thread.root.in_forward and calls_in_progress() == 0:
            self.remove_exit_hook(thread)
            self.leave(thread, now_ns, None)

    def close_interrupted_calls(
        self,
        thread: ThreadState,
        now_ns: int,
        *,
        opening: int = 0,
        running: int | None = None,
        error: Error | None = None,
    ) -> None:
        """Close the calls that an interrupt left open, and the root call if it is one of them.

        Args:
            thread: The thread that runs this.
            now_ns: The time of the event that finds them.
            opening: Calls on the Python stack that are not open yet.
            running: How many calls are still running; None to count them on the Python stack.
            error: The interrupt; None: unknown.
        """
        if self._calls.close_interrupted(thread.calls, now_ns, opening=opening, running=running):
            self.leave(thread, now_ns, error)

    def enter(self, thread: ThreadState, module: Module, *, watch: bool = True) -> bool:
        """Begin a root call; return whether it is recorded in detail.

        Args:
            thread: The calling thread's state.
            module: Whose call it is.
            watch: Whether a hook is put on the module to see the end of a call that is not recorded in detail.
        """
        if thread.root.in_forward or is_generated(module) or is_traced():
            return False  # inside a root call or region that is not recorded
        self.remove_exit_hook(thread)
        if graph_task() != -1 or thread.events.in_fetch or is_replica(module):
            return self._enter_for_another(thread, module)
        if get_worker_info() is not None:  # a spawned worker ran the user's script again
            self._in_data_worker()
            return False
        return self._enter_forward(thread, module, watch=watch)

    def _enter_for_another(self, thread: ThreadState, module: Module) -> bool:
        """Begin a call inside a backward, inside another thread's forward, or inside a fetch, which is not recorded."""
        if graph_task() != -1:
            self._enter_recomputation(thread)
        elif is_replica(module):
            return self._enter_replica(thread, module)
        else:
            thread.root.dropped_from = len(thread.calls.records)
        return self._hooks.all_in

    def _enter_forward(self, thread: ThreadState, module: Module, *, watch: bool) -> bool:
        """Begin a forward of the thread's step or evaluation; return whether it is recorded in detail."""
        detailed = self._begin_forward(thread, module)
        if self.model is None:
            with without_torch_function():
                self.model = self._registry.describe(module)
        self._registry.enter(module)  # also without detail: registrations need the names
        self._hooks.set_detailed(thread, detailed=detailed)
        if not detailed:  # other threads' hooks may go out before it ends
            if not watch or self._hooks.watch_exit(thread, module, innermost_call()):
                return False
            self._hooks.set_detailed(thread, detailed=True)
        if len(thread.calls.records) >= MAX_STEP_CALLS:
            thread.root.dropped_from = len(thread.calls.records)
            self._warn(MANY_CALLS, MAX_STEP_CALLS)
        return True

    def _enter_replica(self, thread: ThreadState, replica: Module) -> bool:
        """Record a replica's call for the thread whose forward waits for it; return whether it is recorded."""
        joined = join_waiting_forward(thread, replica, list(self._threads.all), self._registry)
        if thread.root.dropped_from is not None:
            self._warn(WHOSE_REPLICA, type(replica).__name__)
        return joined

    def _begin_forward(self, thread: ThreadState, module: Module) -> bool:
        """Pass the start of a forward to the step detector; return whether the step is recorded in detail."""
        detector = thread.step_detector
        close_interrupted_backward(thread)
        if detector.stepping:
            close_interrupted_optimizer(thread)
        grad = torch.is_grad_enabled()
        training = is_training(module)
        now_ns = perf_counter_ns()
        segment = detector.forward_begins(now_ns, grad=grad, model=id(module), training=training)
        if thread.phase_log is not None and segment.user_span is not SUPPRESSED:
            thread.phase_log.begin("forward", now_ns, grad=grad, alignment=segment.alignment)
        if grad:
            segment.models[id(module)] = weakref.ref(module)
            self._buckets.forward_begins(module)
        thread.root.in_forward = thread.root.has_run = True
        self._device_marks.check_running()
        self._active_spans.enter(thread, segment, forward=True)
        forwarding = self._threads.forwarding
        forwarding.add(thread)
        if len(forwarding) == 1 and (thread.events.trains or _is_alone()):
            self._hooks.disarm()  # beside a thread that trains, only the first forward of another thread may be missed
        if segment.detailed is None or (grad and segment.forwards_with_grad == 1 and not segment.detailed):
            segment.detailed = self._is_detailed(segment, grad=grad)
        return segment.detailed and not self._only_forwards(thread, segment)

    def _only_forwards(self, thread: ThreadState, segment: StepSegment) -> bool:
        """Return whether a thread runs ever more forwards and no backward, while another thread runs backwards.

        The budget does not see them, and their calls would be one record that takes the place of many steps.
        """
        if segment.forwards <= MAX_UNTRAINED_FORWARDS or self._detail.always or thread.events.trains:
            return False
        return any(other.events.trains for other in list(self._threads.all))

    def _is_detailed(self, segment: StepSegment, *, grad: bool) -> bool:
        numbers, detail = self._numbers, self._detail
        if grad or segment.trained or segment.explicit:
            return detail.of_step(numbers["step"] + segment.ahead, segment.alignment)
        return detail.of_evaluation(numbers["evaluation"])

    def leave(self, thread: ThreadState, now_ns: int, error: Error | None) -> None:
        """End a root call."""
        root, calls, detector = thread.root, thread.calls, thread.step_detector
        forward = root.in_forward
        if forward and len(self._threads.all) > 1:
            self._end_replicas(thread, now_ns)
        if root.dropped_from is not None:
            if not thread.events.in_fetch:
                self._switch.calls_dropped += len(calls.records) - root.dropped_from
            del calls.records[root.dropped_from :]
        if root.owner is not None:
            calls.move_to(root.owner.calls, thread.thread.ident or 0)  # the calling thread may be another one
        root.end()
        calls.end_root_call()
        if forward:
            self._active_spans.leave_forward(thread)
            if thread.phase_log is not None:
                thread.phase_log.end("forward", now_ns)
            detector.forward_ends(now_ns, error)
            if not detector.in_step:
                self._active_spans.leave_step(thread)
                if not self._detail.always:
                    self._hooks.release(thread)  # a server's thread may be idle for long
            if self._is_episode(thread):
                return
        self._hooks.arm()

    def _is_episode(self, thread: ThreadState) -> bool:
        """Return whether further forwards of the thread may be left unobserved, until its next other event.

        In reinforcement learning hundreds of small forwards come before a backward, and seeing one costs 20 µs. They
        are observed if norms are to be read, which needs all models, and if another thread runs forwards.
        """
        return (
            thread.step_detector.is_episode
            and len(self._threads.forwarding) == 1
            and not (self._hooks.all_in or self._gradients.beyond_detail)
        )

    def _end_replicas(self, thread: ThreadState, now_ns: int) -> None:
        """Close the interrupted calls of replicas: their threads have no further event, and keep tensors alive."""
        for other in list(self._threads.all):
            if other.root.owner is thread:
                self.close_interrupted_calls(other, now_ns, running=0)

    def _enter_recomputation(self, thread: ThreadState) -> None:
        """Record a forward that runs inside a backward for the thread that the backward belongs to."""
        owner = None
        thread.root.is_recomputation = True
        if not thread.events.in_backward:  # a thread of the autograd engine
            owner = thread.root.owner = self.thread_in_backward()
            if owner is None:
                thread.root.dropped_from = len(thread.calls.records)
        thread.calls.begin_inside(None if owner is None else owner.calls, recomputes=True)

    def thread_in_backward(self) -> ThreadState | None:
        """Return the thread whose backward runs on a thread of the autograd engine; None if it is ambiguous."""
        owners = [thread for thread in list(self._threads.all) if thread.events.in_backward]
        return owners[0] if len(owners) == 1 else None

    def remove_exit_hook(self, thread: ThreadState) -> None:
        """Remove the hook that sees the end of the thread's root call."""
        if thread.exit_watch.module is not None:
            self._hooks.unwatch_exit(thread, list(self._threads.forwarding))


def close_interrupted_backward(thread: ThreadState, *, opening: int = 0) -> None:
    """Close backwards whose end was not seen, because Ctrl-C arrived in a hook: the thread runs no backward now.

    A signal handler may run in the hook before or after a backward, which is on the Python stack then.
    """
    is_open = thread.events.in_backward or thread.step_detector.running
    if is_open and graph_task() == -1 and backwards_in_progress() <= opening:
        thread.events.in_backward, now_ns = 0, perf_counter_ns()
        if thread.phase_log is not None:
            thread.phase_log.end("backward", now_ns)
        thread.step_detector.close_unfinished_backwards(now_ns)


def close_interrupted_optimizer(thread: ThreadState) -> None:
    """Close optimizer steps that raised without a call of `EventHooks._optimizer_fails`."""
    if thread.step_detector.stepping and optimizer_steps_in_progress() == 0:
        now_ns = perf_counter_ns()
        if thread.phase_log is not None:
            thread.phase_log.end("optimizer", now_ns)
        thread.step_detector.close_unfinished_optimizers(now_ns)


def _is_alone() -> bool:
    """Return whether no other Python thread may call modules."""
    own = threading.current_thread()
    return all(one is own or one.name.startswith(NEVER_FORWARD) for one in threading.enumerate())
