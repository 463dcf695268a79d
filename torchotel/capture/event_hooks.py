"""Hooks of fetches, backwards, optimizer steps, gradient scalers and registrations."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter_ns
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module
from torch.nn.modules import module as nn_module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchotel._limits import MAX_REGISTRATIONS
from torchotel._records import SUPPRESSED, Registration, SpanReference
from torchotel._utils.imports import after_import
from torchotel.capture import torch_internals
from torchotel.capture.logged_values import LeadingOptimizer
from torchotel.capture.root_calls import close_interrupted_optimizer

if TYPE_CHECKING:
    from torchotel._utils.faults import Guard, Warn
    from torchotel.capture.active_span import ActiveSpans
    from torchotel.capture.autograd_hooks import RecordingSwitch
    from torchotel.capture.exceptions import ErrorReader
    from torchotel.capture.gradient_norms import Gradients
    from torchotel.capture.hook_manager import ModuleHooks
    from torchotel.capture.logged_values import LearningRates
    from torchotel.capture.module_registry import ModuleRegistry
    from torchotel.capture.root_calls import RootCalls
    from torchotel.capture.step_segment import StepSegment
    from torchotel.capture.thread_state import CurrentThread, ThreadState
    from torchotel.capture.torch_compile import CompileHooks


TASKS = (
    "two tasks of asyncio train on one thread: what they do in turns is recorded as one step. Train in a thread for "
    "each, as by asyncio.to_thread(), to see steps of each; torchotel.step() can't tell them apart either"
)


class EventState:
    """What the events of one thread have shown so far: fetches, backwards and steps of optimizers."""

    __slots__ = (
        "fetch_start_ns", "in_backward", "in_fetch", "leading_optimizer", "optimizer_steps", "registrations", "stepped",
        "trains", "unrecorded_backwards",
    )  # fmt: skip

    def __init__(self) -> None:
        self.trains = False
        """Whether a backward has run."""
        self.in_backward = 0
        """Runs of the autograd engine that have begun and not ended."""
        self.unrecorded_backwards = 0
        """Runs of the engine that have begun and not ended and are not events of this thread.

        The compiler runs some. Others run inside a backward of another thread, on a thread of the engine: a device has
        such a thread, and reentrant checkpoints run the engine in it.
        """
        self.in_fetch = self.fetch_start_ns = 0
        self.optimizer_steps = 0
        """Steps of optimizers since `GradScaler.step` began."""
        self.stepped: tuple[int, weakref.ref[asyncio.Task[Any]] | None] = 0, None
        """The `id()` of the optimizer that stepped last, and the task of asyncio that it stepped in."""
        self.leading_optimizer = LeadingOptimizer()
        self.registrations: list[Registration] = []

    def drain_into(self, segment: StepSegment) -> None:
        """Move the registrations since the last segment into the one that ends."""
        if self.registrations:
            segment.registrations, self.registrations = self.registrations, []


class EventHooks:
    """Install the hooks of events, and pass each event to the thread's step detector.

    A wrapper may be called after it was removed, if another library has put its own wrapper over it.

    Args:
        current_thread: The calling thread's state.
        root_calls: Closes what an interrupt left open before each event.
        hooks: Which module hooks are in; armed after each event.
        compile_hooks: Tells whether something is compiled.
        active_spans: Attaches the step to the program's context.
        registry: The modules' states and names.
        gradients: Takes gradient norms.
        rates: Reads learning rates.
        errors: Reads exceptions.
        switch: Whether anything is recorded.
        user_span: Returns the program's current span; `SUPPRESSED` in a block of `suppress_instrumentation()`.
        numbers: How many steps were recorded.
        guard: Counts internal errors.
        warn: Logs a warning once.
    """

    def __init__(
        self,
        current_thread: CurrentThread,
        root_calls: RootCalls,
        hooks: ModuleHooks,
        compile_hooks: CompileHooks,
        active_spans: ActiveSpans,
        registry: ModuleRegistry,
        gradients: Gradients,
        rates: LearningRates,
        errors: ErrorReader,
        switch: RecordingSwitch,
        user_span: Callable[[], SpanReference | None],
        numbers: Mapping[str, int],
        guard: Guard,
        warn: Warn,
    ) -> None:
        self._current_thread, self._root_calls, self._hooks, self._compile_hooks, self._active_spans = (
            current_thread,
            root_calls,
            hooks,
            compile_hooks,
            active_spans,
        )
        self._registry, self._gradients, self._rates, self._errors = registry, gradients, rates, errors
        self._switch, self._user_span, self._numbers = switch, user_span, numbers
        self._guarded, self._warn = guard.guarded, warn
        self._undos = ExitStack()

    def install(self) -> None:
        """Install all hooks."""
        guarded, undo = self._guarded, self._undos.callback
        undo(torch_internals.around_backward(guarded(self._backward_begins), guarded(self._backward_ends)))
        undo(torch_internals.around_fetch(guarded(self._fetch_begins), guarded(self._fetch_ends)))
        undo(torch_internals.after_failed_step(guarded(self._optimizer_fails)))
        undo(torch_internals.around_scaler_step(guarded(self._scaler_begins), guarded(self._scaler_ends)))
        undo(self._after_scaling(torch.amp.GradScaler))
        undo(torch_internals.before_clipping(guarded(self._clipping_begins)))
        undo(after_import("torch.distributed.fsdp.sharded_grad_scaler", guarded(self._sharded_imported)))
        undo(after_import("torch.distributed.fsdp.fully_sharded_data_parallel", guarded(self._fsdp_imported)))
        iterated, outside = partial(guarded, iterated=True), torch_internals.outside_dynamo
        for handle in (
            register_optimizer_step_pre_hook(outside(iterated(self._optimizer_begins))),
            register_optimizer_step_post_hook(outside(iterated(self._optimizer_ends))),
            nn_module.register_module_module_registration_hook(iterated(self._module_registered)),
            nn_module.register_module_parameter_registration_hook(iterated(self._parameter_registered)),
            nn_module.register_module_buffer_registration_hook(iterated(self._buffer_registered)),
        ):
            undo(handle.remove)

    def uninstall(self) -> None:
        """Remove all hooks, the last first; a failure to remove one does not prevent removing the others."""
        self._undos.close()

    # ---- backward

    def _backward_begins(self, roots: Any) -> None:
        if not self._switch.open:
            return
        thread, compile_hooks = self._current_thread.state, self._compile_hooks
        if compile_hooks.threads and compile_hooks.running:
            thread.events.unrecorded_backwards += 1
            return
        is_inside = torch_internals.graph_task() != -1
        if is_inside and not thread.events.in_backward:
            thread.events.unrecorded_backwards += 1
            return
        if not is_inside:
            self._root_calls.close_interrupted(thread, opening_backwards=1)
            thread.scaling.backward_begins(roots)
        thread.events.in_backward += 1
        thread.events.trains = True
        now_ns = perf_counter_ns()
        segment = thread.step_detector.backward_begins(now_ns, in_forward=thread.root.in_forward)
        if thread.phase_log is not None and thread.events.in_backward == 1 and segment.user_span is not SUPPRESSED:
            thread.phase_log.begin("backward", now_ns, alignment=segment.alignment)
        if compile_hooks.threads:
            compile_hooks.warn_of_forward()
            segment.hooks_were_out = True
        self._active_spans.enter(thread, segment)

    def _backward_ends(self, exception: BaseException | None, *, accumulates: bool) -> None:
        now_ns = perf_counter_ns()
        thread = self._current_thread.state
        if thread.events.unrecorded_backwards:  # another thread may have begun or ended to compile
            thread.events.unrecorded_backwards -= 1
            return
        if not thread.events.in_backward:
            return  # it began before the hooks were installed
        thread.events.in_backward -= 1
        if not thread.events.in_backward:
            if thread.phase_log is not None:
                thread.phase_log.end("backward", now_ns)
            if exception is None and accumulates:
                self._gradients.backward_ended(thread, self._numbers["step"])
            thread.scaling.backward_ended(accumulates=accumulates)
        error = self._errors.read(exception)
        thread.step_detector.backward_ends(now_ns, error, in_forward=thread.root.in_forward, accumulates=accumulates)
        self._hooks.arm()

    # ---- fetch

    def _fetch_begins(self) -> None:
        if not self._switch.open:
            return
        thread = self._current_thread.state
        if not thread.events.in_fetch:
            self._root_calls.close_interrupted(thread)
            close_interrupted_optimizer(thread)
            thread.events.fetch_start_ns = perf_counter_ns()
            thread.events.in_fetch = 1
            if thread.phase_log is not None and not thread.root.in_forward and self._user_span() is not SUPPRESSED:
                thread.phase_log.begin("data", thread.events.fetch_start_ns)
            self._active_spans.enter(thread, None)
        else:
            thread.events.in_fetch += 1

    def _fetch_ends(self, outcome: str, exception: BaseException | None) -> None:
        now_ns = perf_counter_ns()
        thread = self._current_thread.state
        if not thread.events.in_fetch:
            return
        thread.events.in_fetch -= 1
        if thread.phase_log is not None and not thread.events.in_fetch:
            thread.phase_log.end("data", now_ns)
        if thread.events.in_fetch or thread.root.in_forward:
            return
        if outcome in {"made", "fetched"}:
            thread.step_detector.fetched(thread.events.fetch_start_ns, now_ns)
        elif outcome == "ended":
            thread.step_detector.iterator_ended(thread.events.fetch_start_ns, now_ns)
        else:
            error = self._errors.read(exception)
            thread.step_detector.fetch_failed(thread.events.fetch_start_ns, now_ns, error)
        self._active_spans.leave_step(thread)
        self._hooks.arm()

    # ---- optimizer

    def _stepping_thread(self) -> ThreadState | None:
        """Return the thread whose step an optimizer's step belongs to.

        An optimizer may step inside a backward, in a hook of a parameter. A device's backward runs on a thread of the
        autograd engine. The owner of that backward waits for it, so its state may be changed here. None: the owner is
        ambiguous, and the step is not recorded.
        """
        thread = self._current_thread.state
        if thread.events.in_backward or torch_internals.graph_task() == -1:
            return thread
        return self._root_calls.thread_in_backward()

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        thread = self._stepping_thread()
        if thread is None:
            return
        is_own = thread is self._current_thread.state
        if is_own:  # the calls of another thread are not on this thread's stack
            self._root_calls.close_interrupted(thread)
        if thread.events.stepped[0] != id(optimizer):  # most programs have one
            self._look_at_task(thread, optimizer)
        closure = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
        kind = type(optimizer).__name__
        now_ns = perf_counter_ns()
        segment = thread.step_detector.optimizer_begins(now_ns, id(optimizer), kind, closure=closure)
        if segment is not None:
            is_outermost = len(thread.step_detector.stepping) == 1
            if thread.phase_log is not None and is_outermost and segment.user_span is not SUPPRESSED:
                thread.phase_log.begin("optimizer", now_ns, alignment=segment.alignment)
            number = self._numbers["step"]
            rate = self._rates.read(thread.events.leading_optimizer, optimizer, number)
            segment.learning_rate = segment.learning_rate if rate is None else rate
            wanted = segment.detailed or self._gradients.beyond_detail
            if wanted and is_outermost:
                self._gradients.optimizer_begins(thread, segment, optimizer, number, closure=closure)
        if is_own:
            self._active_spans.enter(thread, segment)

    def _look_at_task(self, thread: ThreadState, optimizer: torch.optim.Optimizer) -> None:
        """Warn if the last other optimizer of the thread belongs to another task that is not done."""
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop runs
            task = None
        last = thread.events.stepped[1]() if thread.events.stepped[1] is not None else None
        if task is not None and last is not None and last is not task and not last.done():
            self._warn(TASKS)
        thread.events.stepped = id(optimizer), None if task is None else weakref.ref(task)

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        thread = self._stepping_thread()
        if thread is None:
            return
        thread.events.optimizer_steps += 1
        if thread.read_in_closure and len(thread.step_detector.stepping) == 1:
            self._gradients.optimizer_ends(thread, thread.step_detector.stepping[0][3], optimizer)
        now_ns = perf_counter_ns()
        thread.step_detector.optimizer_ends(now_ns, id(optimizer))
        if thread.phase_log is not None and not thread.step_detector.stepping:
            thread.phase_log.end("optimizer", now_ns)
        self._hooks.arm()

    def _optimizer_fails(self, exception: BaseException) -> None:
        now_ns = perf_counter_ns()
        thread = self._stepping_thread()
        if thread is None:
            return
        if thread is self._current_thread.state:
            self._root_calls.close_interrupted(thread)
        running = (torch_internals.optimizer_steps_in_progress() or 1) - 1
        thread.step_detector.optimizer_fails(now_ns, self._errors.read(exception), running)
        if thread.phase_log is not None and not running:
            thread.phase_log.end("optimizer", now_ns)
        self._hooks.arm()

    def _clipping_begins(self, gradients: Sequence[torch.Tensor]) -> None:
        self._gradients.clipping_begins(self._current_thread.state, gradients, self._numbers["step"])

    def _scaler_begins(self) -> None:
        self._current_thread.state.events.optimizer_steps = 0

    def _scaler_ends(self, optimizer: torch.optim.Optimizer) -> None:
        thread = self._current_thread.state
        self._unscaled(optimizer, stepped=True)
        if self._switch.open and not thread.events.optimizer_steps:
            segment = thread.step_detector.open_segment
            if segment is not None and segment.read is not None:
                self._gradients.optimizer_ends(thread, segment, optimizer)
            thread.step_detector.optimizer_skipped(perf_counter_ns(), id(optimizer))

    def _sharded_imported(self, module: ModuleType) -> None:
        self._undos.callback(self._after_scaling(module.ShardedGradScaler))

    def _fsdp_imported(self, module: ModuleType) -> None:
        clipping_begins = self._guarded(self._clipping_begins)
        self._undos.callback(torch_internals.before_sharded_clipping(module.FullyShardedDataParallel, clipping_begins))

    def _after_scaling(self, scaler: type) -> torch_internals.Undo:
        guarded = self._guarded
        scaled, unscaled = guarded(self._loss_scaled), guarded(self._optimizer_unscaled)
        updated = guarded(self._scale_updated)
        return torch_internals.after_scaling(scaler, {"scale": scaled, "unscale_": unscaled, "update": updated})

    def _loss_scaled(self, scaler: torch.amp.GradScaler, losses: Any, *_: Any) -> None:
        if scaler.is_enabled():
            self._current_thread.state.scaling.scaled(scaler, losses)

    def _optimizer_unscaled(self, scaler: torch.amp.GradScaler, _: Any, optimizer: torch.optim.Optimizer) -> None:
        if scaler.is_enabled():
            self._unscaled(optimizer, stepped=False)

    def _unscaled(self, optimizer: torch.optim.Optimizer, *, stepped: bool) -> None:
        self._gradients.unscaled(self._current_thread.state, optimizer, self._numbers["step"], stepped=stepped)

    def _scale_updated(self, scaler: torch.amp.GradScaler, *_: Any) -> None:
        self._current_thread.state.scaling.updated()

    # ---- registration

    def _module_registered(self, owner: Module, name: str, child: Module | None) -> None:
        if child is not None:
            self._registry.registered(owner, name, child)
            self._register(owner, name, "module", new=owner._modules.get(name) is not child)

    def _parameter_registered(self, owner: Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        self._register(owner, name, "parameter", new=owner._parameters.get(name) is not parameter)

    def _buffer_registered(self, owner: Module, name: str, buffer: torch.Tensor | None) -> None:
        # A buffer that is assigned in `forward` runs the hook at every call: only new names count.
        self._register(owner, name, "buffer", new=name not in owner._buffers)

    def _register(self, owner: Module, name: str, kind: str, *, new: bool) -> None:
        thread = self._current_thread.state
        if new and thread.step_detector.in_step and len(thread.events.registrations) < MAX_REGISTRATIONS:
            path = self._registry.path_below(owner, name)
            if path is not None:
                thread.events.registrations.append(Registration(perf_counter_ns(), path, kind))
