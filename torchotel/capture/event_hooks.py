"""Everything besides module calls that the step machine hears of: fetches, backwards, optimizers, registrations."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
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
from torchotel._records import Registration
from torchotel._utils.imports import after_import
from torchotel.capture import torch_internals
from torchotel.capture.thread_state import ThreadState

if TYPE_CHECKING:
    from torchotel.capture.recorder import Capture


TASKS = (
    "two tasks of asyncio train on one thread: what they do in turns is recorded as one step. Train in a thread for "
    "each, as by asyncio.to_thread(), to see steps of each; torchotel.step() can't tell them apart either"
)


class EventHooks:
    """Install the seams and hooks of events, and pass what they see to the thread's step machine.

    A seam may be called after it was taken out, where another library has put its own wrapper over ours.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._undos = ExitStack()

    def install(self) -> None:
        """Put them in."""
        guarded, undo = self._capture.guard.guarded, self._undos.callback
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
        if not self._capture.installed:
            return
        thread, compiling = self._capture.here.thread, self._capture.compiling
        if compiling.threads and compiling.running:
            thread.traced_backwards += 1
            return
        if not thread.in_backward:
            self._capture.outermost.settle(thread)
            thread.scaling.backward_begins(roots)
        thread.in_backward += 1
        thread.trains = True
        part = thread.machine.backward_begins(perf_counter_ns(), in_forward=thread.in_forward)
        if compiling.threads:
            compiling.tell_beside()
            part.hooks_were_out = True
        self._capture.live.enter(thread, part)

    def _backward_ends(self, exception: BaseException | None, *, accumulates: bool) -> None:
        now_ns = perf_counter_ns()
        thread = self._capture.here.thread
        if thread.traced_backwards:  # not asked of the compiler: another thread may have begun or ended to compile
            thread.traced_backwards -= 1
            return
        if not thread.in_backward:
            return  # it began before we came
        thread.in_backward -= 1
        if not thread.in_backward:
            if exception is None and accumulates:
                self._capture.gradients.backward_ended(thread, self._capture.numbers["step"])
            thread.scaling.backward_ended(accumulates=accumulates)
        error = self._capture.errors.read(exception)
        thread.machine.backward_ends(now_ns, error, in_forward=thread.in_forward, accumulates=accumulates)
        self._capture.hooks.arm()

    # ---- fetch

    def _fetch_begins(self) -> None:
        if not self._capture.installed:
            return
        thread = self._capture.here.thread
        if not thread.in_fetch:
            self._capture.outermost.settle(thread)
            self.settle_optimizer(thread)
            thread.fetch_start_ns = perf_counter_ns()
            thread.in_fetch = 1
            self._capture.live.enter(thread, None)
        else:
            thread.in_fetch += 1

    def _fetch_ends(self, outcome: str, exception: BaseException | None) -> None:
        now_ns = perf_counter_ns()
        thread = self._capture.here.thread
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
            error = self._capture.errors.read(exception)
            thread.machine.fetch_failed(thread.fetch_start_ns, now_ns, error)
        self._capture.live.leave_step(thread)
        self._capture.hooks.arm()

    # ---- optimizer

    def settle_optimizer(self, thread: ThreadState) -> None:
        """Close the optimizer steps that raised where `_optimizer_fails` was not called."""
        if thread.machine.stepping and torch_internals.optimizer_steps_in_progress() == 0:
            thread.machine.abandon_stepping(perf_counter_ns())

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        thread = self._capture.here.thread
        self._capture.outermost.settle(thread)
        if thread.stepped[0] != id(optimizer):  # most programs have one
            self._look_at_task(thread, optimizer)
        closure = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
        kind = type(optimizer).__name__
        part = thread.machine.optimizer_begins(perf_counter_ns(), id(optimizer), kind, closure=closure)
        if part is not None:
            number = self._capture.numbers["step"]
            rate = self._capture.rates.read(thread.leading_optimizer, optimizer, number)
            part.learning_rate = part.learning_rate if rate is None else rate
            gradients = self._capture.gradients
            if (part.detailed or gradients.beyond_detail) and len(thread.machine.stepping) == 1:
                gradients.optimizer_begins(thread, part, optimizer, number, closure=closure)
        self._capture.live.enter(thread, part)

    def _look_at_task(self, thread: ThreadState, optimizer: torch.optim.Optimizer) -> None:
        """Warn where the last other optimizer of the thread belongs to another task, which is not done."""
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop runs
            task = None
        last = thread.stepped[1]() if thread.stepped[1] is not None else None
        if task is not None and last is not None and last is not task and not last.done():
            self._capture.warn(TASKS)
        thread.stepped = id(optimizer), None if task is None else weakref.ref(task)

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        thread = self._capture.here.thread
        thread.optimizer_steps += 1
        if thread.read_in_closure and len(thread.machine.stepping) == 1:
            self._capture.gradients.optimizer_ends(thread, thread.machine.stepping[0][3], optimizer)
        thread.machine.optimizer_ends(perf_counter_ns(), id(optimizer))
        self._capture.hooks.arm()

    def _optimizer_fails(self, exception: BaseException) -> None:
        now_ns = perf_counter_ns()
        thread = self._capture.here.thread
        self._capture.outermost.settle(thread)
        running = (torch_internals.optimizer_steps_in_progress() or 1) - 1
        thread.machine.optimizer_fails(now_ns, self._capture.errors.read(exception), running)
        self._capture.hooks.arm()

    def _clipping_begins(self, gradients: Sequence[torch.Tensor]) -> None:
        capture = self._capture
        capture.gradients.clipping_begins(capture.here.thread, gradients, capture.numbers["step"])

    def _scaler_begins(self) -> None:
        self._capture.here.thread.optimizer_steps = 0

    def _scaler_ends(self, optimizer: torch.optim.Optimizer) -> None:
        thread = self._capture.here.thread
        self._unscaled(optimizer, stepped=True)
        if self._capture.installed and not thread.optimizer_steps:
            part = thread.machine.open_part
            if part is not None and part.read is not None:
                self._capture.gradients.optimizer_ends(thread, part, optimizer)
            thread.machine.optimizer_skipped(perf_counter_ns(), id(optimizer))

    def _sharded_imported(self, module: ModuleType) -> None:
        self._undos.callback(self._after_scaling(module.ShardedGradScaler))

    def _fsdp_imported(self, module: ModuleType) -> None:
        clipping_begins = self._capture.guard.guarded(self._clipping_begins)
        self._undos.callback(torch_internals.before_sharded_clipping(module.FullyShardedDataParallel, clipping_begins))

    def _after_scaling(self, scaler: type) -> torch_internals.Undo:
        guarded = self._capture.guard.guarded
        scaled, unscaled = guarded(self._loss_scaled), guarded(self._optimizer_unscaled)
        updated = guarded(self._scale_updated)
        return torch_internals.after_scaling(scaler, {"scale": scaled, "unscale_": unscaled, "update": updated})

    def _loss_scaled(self, scaler: torch.amp.GradScaler, losses: Any, *_: Any) -> None:
        if scaler.is_enabled():
            self._capture.here.thread.scaling.scaled(scaler, losses)

    def _optimizer_unscaled(self, scaler: torch.amp.GradScaler, _: Any, optimizer: torch.optim.Optimizer) -> None:
        if scaler.is_enabled():
            self._unscaled(optimizer, stepped=False)

    def _unscaled(self, optimizer: torch.optim.Optimizer, *, stepped: bool) -> None:
        capture = self._capture
        capture.gradients.unscaled(capture.here.thread, optimizer, capture.numbers["step"], stepped=stepped)

    def _scale_updated(self, scaler: torch.amp.GradScaler, *_: Any) -> None:
        self._capture.here.thread.scaling.updated()

    # ---- registration

    def _module_registered(self, owner: Module, name: str, child: Module | None) -> None:
        if child is not None:
            self._capture.paths.registered(owner, name, child)
            self._register(owner, name, "module", new=owner._modules.get(name) is not child)

    def _parameter_registered(self, owner: Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        self._register(owner, name, "parameter", new=owner._parameters.get(name) is not parameter)

    def _buffer_registered(self, owner: Module, name: str, buffer: torch.Tensor | None) -> None:
        # A buffer that is assigned in forward fires at every call: only new names count.
        self._register(owner, name, "buffer", new=name not in owner._buffers)

    def _register(self, owner: Module, name: str, kind: str, *, new: bool) -> None:
        thread = self._capture.here.thread
        if new and thread.machine.in_step and len(thread.registrations) < MAX_REGISTRATIONS:
            path = self._capture.paths.path_below(owner, name)
            if path is not None:
                thread.registrations.append(Registration(perf_counter_ns(), path, kind))
