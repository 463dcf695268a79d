"""Timers beside torchotel: hooks that only take the time, on every autograd node and around every leaf's forward."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from fidelity.counted import Call, nodes_of


class Interval(NamedTuple):
    """When something ran, in nanoseconds of one clock."""

    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """Give how long it lasted."""
        return self.end_ns - self.start_ns


@dataclass
class Nodes:
    """When nodes of the graph ran."""

    stamps: dict[int, list[int]] = field(default_factory=dict)
    """When each began and ended, by its number."""

    def watch(self, roots: Sequence[Tensor]) -> None:
        for node in {node for root in roots for node in nodes_of(root)}:
            stamps = self.stamps.setdefault(node._sequence_nr(), [])
            node.register_prehook(lambda _, stamps=stamps: stamps.append(perf_counter_ns()))
            node.register_hook(lambda *_, stamps=stamps: stamps.append(perf_counter_ns()))

    def of(self, call: Call) -> Interval | None:
        own = [t for number in range(call.first, call.last) for t in self.stamps.get(number, ())]
        return Interval(min(own), max(own)) if own else None


class Leaves:
    """When forwards of modules that hold no others begin and end: by the last hook before each and the first after."""

    def __init__(self) -> None:
        self._log: list[tuple[nn.Module, bool, int]] = []  # True: begins
        self._hooked: set[nn.Module] = set()
        self._handles: list[RemovableHandle] = []

    def hook(self, module: nn.Module) -> None:
        if not self._handles:  # before ours, which come with the first call; strict export takes no global hook
            # Also called where an exception ends what a checkpoint runs again.
            self._handles.append(register_module_forward_hook(self._ends, always_call=True))
        if module in self._hooked or any(module.children()) or isinstance(module, torch.jit.ScriptModule):
            return
        self._hooked.add(module)
        # Global hooks come before a module's own.
        self._handles.append(module.register_forward_pre_hook(self._begins, prepend=True))

    def _begins(self, module: nn.Module, _: object) -> None:
        if not is_dynamo_compiling():
            self._log.append((module, True, perf_counter_ns()))

    def _ends(self, module: nn.Module, *_: object) -> None:
        if not is_dynamo_compiling():
            self._log.append((module, False, perf_counter_ns()))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def intervals(self) -> dict[nn.Module, list[Interval]]:
        times: dict[nn.Module, list[Interval]] = {}
        starts: dict[nn.Module, int] = {}
        for module, begins, time_ns in self._log:
            if begins:
                starts[module] = time_ns
            elif module in starts:  # others end, too
                times.setdefault(module, []).append(Interval(starts.pop(module), time_ns))
        return times


@contextmanager
def timed_leaves() -> Iterator[Leaves]:
    leaves, original = Leaves(), nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            leaves.hook(module)
        return original(module, *args, **kwargs)

    try:
        with patch.object(nn.Module, "__call__", call):
            yield leaves
    finally:
        leaves.remove()
