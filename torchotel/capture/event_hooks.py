"""Everything besides module calls that the step machine hears of: fetches, backwards, optimizers, registrations."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter_ns
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module
from torch.nn.modules import module as nn_module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchotel._records import Registration
from torchotel._utils.imports import after_import
from torchotel.capture import torch_internals
from torchotel.capture.root_calls import close_interrupted_optimizer
from torchotel.capture.thread_state import MAX_REGISTRATIONS, ThreadState

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
    from torchotel.capture.thread_state import CurrentThread
    from torchotel.capture.torch_compile import CompileHooks


TASKS = (
    "two tasks of asyncio train on one thread: what they do in turns is recorded as one step. Train in a thread for "
    "each, as by asyncio.to_thread(), to see steps of each; torchotel.step() can't tell them apart either"
)


class EventHooks:
    """Install the seams and hooks of events, and pass what they see to the thread's step detector.

    A seam may be called after it was taken out, if another library has put its own wrapper over ours.

    Args:
        here: The calling thread's state.
        roots: Closes what an interrupt left open before each event.
        hooks: Which module hooks are in; armed after each event.
        compiling: Tells whether something is compiled.
        live: Makes the step current in the program's context.
        paths: Names of modules.
        gradients: Takes gradient norms.
        rates: Reads learning rates.
        errors: Reads exceptions.
        switch: Whether anything is recorded.
        numbers: How many steps were handed over.
        guard: Counts internal errors.
        warn: Called with what the user is to know.
    """

    def __init__(
        self,
        here: CurrentThread,
        roots: RootCalls,
        hooks: ModuleHooks,
        compiling: CompileHooks,
        live: ActiveSpans,
        paths: ModuleRegistry,
        gradients: Gradients,
        rates: LearningRates,
        errors: ErrorReader,
        switch: RecordingSwitch,
        numbers: Mapping[str, int],
        guard: Guard,
        warn: Warn,
    ) -> None:
        self._here, self._roots, self._hooks, self._compiling, self._live = here, roots, hooks, compiling, live
        self._paths, self._gradients, self._rates, self._errors = paths, gradients, rates, errors
        self._switch, self._numbers, self._guarded, self._warn = switch, numbers, guard.guarded, warn
        self._undos = ExitStack()

    def install(self) -> None:
        """Put them in."""
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
        """Take them out, the last first; one that can't be keeps no other in."""
        self._undos.close()

    # ---- backward

    def _backward_begins(self, roots: Any) -> None:
        if not self._switch.open:
            return
        thread, compiling = self._here.thread, self._compiling
        if compiling.threads and compiling.running:
            thread.traced_backwards += 1
            return
        if not thread.in_backward:
            self._roots.settle(thread)
            thread.scaling.backward_begins(roots)
        thread.in_backward += 1
        thread.trains = True
        part = thread.machine.backward_begins(perf_counter_ns(), in_forward=thread.in_forward)
        if compiling.threads:
            compiling.tell_beside()
            part.hooks_were_out = True
        self._live.enter(thread, part)

    def _backward_ends(self, exception: BaseException | None, *, accumulates: bool) -> None:
        now_ns = perf_counter_ns()
        thread = self._here.thread
        if thread.traced_backwards:  # not asked of the compiler: another thread may have begun or ended to compile
            thread.traced_backwards -= 1
            return
        if not thread.in_backward:
            return  # it began before we came
        thread.in_backward -= 1
        if not thread.in_backward:
            if exception is None and accumulates:
                self._gradients.backward_ended(thread, self._numbers["step"])
            thread.scaling.backward_ended(accumulates=accumulates)
        error = self._errors.read(exception)
        thread.machine.backward_ends(now_ns, error, in_forward=thread.in_forward, accumulates=accumulates)
        self._hooks.arm()

    # ---- fetch

    def _fetch_begins(self) -> None:
        if not self._switch.open:
            return
        thread = self._here.thread
        if not thread.in_fetch:
            self._roots.settle(thread)
            close_interrupted_optimizer(thread)
            thread.fetch_start_ns = perf_counter_ns()
            thread.in_fetch = 1
            self._live.enter(thread, None)
        else:
            thread.in_fetch += 1

    def _fetch_ends(self, outcome: str, exception: BaseException | None) -> None:
        now_ns = perf_counter_ns()
        thread = self._here.thread
        if not thread.in_fetch:
            return
        thread.in_fetch -= 1
        if thread.in_fetch or thread.in_forward:
            return
        if outcome in {"made", "fetched"}:
            thread.machine.fetched(thread.fetch_start_ns, now_ns)
        elif outcome == "ended":
            thread.machine.iterator_ended(thread.fetch_start_ns, now_ns)
        else:
            error = self._errors.read(exception)
            thread.machine.fetch_failed(thread.fetch_start_ns, now_ns, error)
        self._live.leave_step(thread)
        self._hooks.arm()

    # ---- optimizer

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        thread = self._here.thread
        self._roots.settle(thread)
        if thread.stepped[0] != id(optimizer):  # most programs have one
            self._look_at_task(thread, optimizer)
        closure = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
        kind = type(optimizer).__name__
        part = thread.machine.optimizer_begins(perf_counter_ns(), id(optimizer), kind, closure=closure)
        if part is not None:
            number = self._numbers["step"]
            rate = self._rates.read(thread.leading_optimizer, optimizer, number)
            part.learning_rate = part.learning_rate if rate is None else rate
            wanted = part.detailed or self._gradients.beyond_detail
            if wanted and len(thread.machine.stepping) == 1:
                self._gradients.optimizer_begins(thread, part, optimizer, number, closure=closure)
        self._live.enter(thread, part)

    def _look_at_task(self, thread: ThreadState, optimizer: torch.optim.Optimizer) -> None:
        """Warn where the last other optimizer of the thread belongs to another task, which is not done."""
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop runs
            task = None
        last = thread.stepped[1]() if thread.stepped[1] is not None else None
        if task is not None and last is not None and last is not task and not last.done():
            self._warn(TASKS)
        thread.stepped = id(optimizer), None if task is None else weakref.ref(task)

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        thread = self._here.thread
        thread.optimizer_steps += 1
        if thread.read_in_closure and len(thread.machine.stepping) == 1:
            self._gradients.optimizer_ends(thread, thread.machine.stepping[0][3], optimizer)
        thread.machine.optimizer_ends(perf_counter_ns(), id(optimizer))
        self._hooks.arm()

    def _optimizer_fails(self, exception: BaseException) -> None:
        now_ns = perf_counter_ns()
        thread = self._here.thread
        self._roots.settle(thread)
        running = (torch_internals.optimizer_steps_in_progress() or 1) - 1
        thread.machine.optimizer_fails(now_ns, self._errors.read(exception), running)
        self._hooks.arm()

    def _clipping_begins(self, gradients: Sequence[torch.Tensor]) -> None:
        self._gradients.clipping_begins(self._here.thread, gradients, self._numbers["step"])

    def _scaler_begins(self) -> None:
        self._here.thread.optimizer_steps = 0

    def _scaler_ends(self, optimizer: torch.optim.Optimizer) -> None:
        thread = self._here.thread
        self._unscaled(optimizer, stepped=True)
        if self._switch.open and not thread.optimizer_steps:
            part = thread.machine.open_part
            if part is not None and part.read is not None:
                self._gradients.optimizer_ends(thread, part, optimizer)
            thread.machine.optimizer_skipped(perf_counter_ns(), id(optimizer))

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
            self._here.thread.scaling.scaled(scaler, losses)

    def _optimizer_unscaled(self, scaler: torch.amp.GradScaler, _: Any, optimizer: torch.optim.Optimizer) -> None:
        if scaler.is_enabled():
            self._unscaled(optimizer, stepped=False)

    def _unscaled(self, optimizer: torch.optim.Optimizer, *, stepped: bool) -> None:
        self._gradients.unscaled(self._here.thread, optimizer, self._numbers["step"], stepped=stepped)

    def _scale_updated(self, scaler: torch.amp.GradScaler, *_: Any) -> None:
        self._here.thread.scaling.updated()

    # ---- registration

    def _module_registered(self, owner: Module, name: str, child: Module | None) -> None:
        if child is not None:
            self._paths.registered(owner, name, child)
            self._register(owner, name, "module", new=owner._modules.get(name) is not child)

    def _parameter_registered(self, owner: Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        self._register(owner, name, "parameter", new=owner._parameters.get(name) is not parameter)

    def _buffer_registered(self, owner: Module, name: str, buffer: torch.Tensor | None) -> None:
        # A buffer that is assigned in forward fires at every call: only new names count.
        self._register(owner, name, "buffer", new=name not in owner._buffers)

    def _register(self, owner: Module, name: str, kind: str, *, new: bool) -> None:
        thread = self._here.thread
        if new and thread.machine.in_step and len(thread.registrations) < MAX_REGISTRATIONS:
            path = self._paths.path_below(owner, name)
            if path is not None:
                thread.registrations.append(Registration(perf_counter_ns(), path, kind))
