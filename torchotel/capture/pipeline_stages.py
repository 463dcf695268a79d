"""Pipeline stages of this rank: which microbatch a module call is for, and which models have parts on other ranks."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torchotel._records import CallNote
from torchotel._utils.imports import after_import
from torchotel.capture.torch_internals import around_stage_forward

if TYPE_CHECKING:
    from types import ModuleType

    from torch.nn import Module

    from torchotel._utils.faults import Guard
    from torchotel.capture.thread_state import CurrentThread
    from torchotel.capture.torch_internals import Undo


class PipelineStages:
    """See each forward of a stage of `torch.distributed.pipelining`.

    Args:
        current_thread: The calling thread's state.
        modules: Gets the module of each stage, by `id()`.
        guard: Counts internal errors.
    """

    def __init__(
        self, current_thread: CurrentThread, modules: weakref.WeakValueDictionary[int, Module], guard: Guard
    ) -> None:
        self._current_thread, self._modules, self._guarded = current_thread, modules, guard.guarded
        self._undos: list[Undo] = []

    def install(self) -> None:
        """Install the hook, as soon as the program imports pipelines."""
        self._undos.append(after_import("torch.distributed.pipelining.stage", self._guarded(self._imported)))

    def uninstall(self) -> None:
        """Remove the hook."""
        while self._undos:
            self._undos.pop()()

    def _imported(self, module: ModuleType) -> None:
        self._undos.append(around_stage_forward(module, self._guarded(self._begins), self._guarded(self._ends)))

    def _begins(self, stage: Any, microbatch: int) -> None:
        self._modules[id(stage.submod)] = stage.submod
        self._current_thread.state.calls.note = CallNote(microbatch=(stage.stage_index, microbatch))

    def _ends(self) -> None:
        self._current_thread.state.calls.note = None
