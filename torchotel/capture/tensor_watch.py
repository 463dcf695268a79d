"""Records the gradient norms of watched tensors, by a hook on each tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle, unserializable_hook

from torchotel._limits import MAX_WATCH_NAMES, MAX_WATCHED
from torchotel._records import TensorGradient
from torchotel._utils.faults import Guard, Warn
from torchotel._utils.text import shortened
from torchotel.capture.call_signatures import shape_of
from torchotel.capture.tensor_norms import Norms, norms_async
from torchotel.capture.torch_internals import without_torch_function

if TYPE_CHECKING:
    from torchotel.capture.thread_state import CurrentThread, ThreadState


class PendingGradient:
    """The gradient of a watched tensor, whose norm may not be ready."""

    __slots__ = ("_name", "_norms", "_shape", "_time_ns")

    def __init__(self, time_ns: int, name: str, shape: str, norms: Norms | None) -> None:
        self._time_ns, self._name, self._shape, self._norms = time_ns, name, shape, norms

    def ready(self) -> bool:
        """Return whether the norm is ready, without waiting; for a training thread."""
        return self._norms is None or self._norms.ready()

    def wait(self) -> None:
        """Wait until the norm is ready."""
        if self._norms is not None:
            self._norms.wait()

    def result(self) -> TensorGradient:
        """Build the record, without the norm if it is not ready."""
        values = None if self._norms is None else self._norms.values()
        return TensorGradient(self._time_ns, self._name, self._shape, None if values is None else values[0])


class Watches:
    """Put hooks on watched tensors.

    Args:
        current_thread: The calling thread's state.
        warn: Logs a warning once.
    """

    def __init__(self, current_thread: CurrentThread, warn: Warn) -> None:
        self._current_thread, self._warn = current_thread, warn
        self._names: set[str] = set()
        self._leaves: dict[int, _Leaf] = {}
        self._on = False
        self.guard = Guard("watch", off=self.uninstall)

    def install(self) -> None:
        """Start recording gradients."""
        self._on = not self.guard.is_off

    def uninstall(self) -> None:
        """Stop: remove the hooks of leaves; hooks on other tensors do nothing and are freed with their graph."""
        self._on = False
        for leaf in list(self._leaves.values()):
            leaf.remove()
        self._leaves.clear()

    def watch(self, tensor: Tensor, name: str) -> None:
        """Record the gradient of a tensor at each backward; never raises."""
        if is_compiling() or not self._on:
            return
        try:
            with without_torch_function():
                if self._may_watch(tensor, name):
                    self._put_hook(tensor, shortened(name))
        except Exception:  # noqa: BLE001  # no internal error may reach the user's program
            self.guard.fault()

    def _may_watch(self, tensor: Any, name: Any) -> bool:
        if not isinstance(tensor, Tensor):
            self._warn("watch takes a tensor, got %s: it is not watched", type(tensor).__name__)
        elif not isinstance(name, str) or not name:
            self._warn("watch takes a name as a string, got %r: it is not watched", name)
        elif not tensor.requires_grad:
            if torch.is_grad_enabled():  # without gradients none is expected
                self._warn("watch: %r does not require grad, so there is no gradient to watch", name)
        elif name not in self._names and len(self._names) >= MAX_WATCH_NAMES:
            self._warn("watch takes %d names, %r is one too many: it is not watched", MAX_WATCH_NAMES, name)
        else:
            self._names.add(name)
            return True
        return False

    def _put_hook(self, tensor: Tensor, name: str) -> None:
        thread = self._current_thread.state
        thread = thread.root.owner or thread
        if not tensor.is_leaf:
            tensor.register_hook(self._hook(lambda: thread, name))
            return
        key = id(tensor)
        leaf = self._leaves.get(key)
        if leaf is None or leaf.tensor() is not tensor:
            leaf = self._leaves[key] = _Leaf(weakref.ref(tensor, lambda _: self._leaves.pop(key, None)), thread)
        leaf.thread = thread
        if name not in leaf.handles:
            leaf.handles[name] = tensor.register_hook(self._hook(leaf.find_thread, name))

    def _hook(self, find_thread: Callable[[], ThreadState], name: str) -> Callable[[Tensor], None]:
        def report(gradient: Tensor | None) -> None:
            if is_compiling() or not self._on or gradient is None:
                return
            now_ns = perf_counter_ns()
            try:
                self._report(find_thread(), name, gradient, now_ns)
            except Exception:  # noqa: BLE001  # no internal error may reach the user's backward
                self.guard.fault()

        hook: Callable[[Tensor], None] = unserializable_hook(report)  # otherwise saving the tensor logs a warning
        return hook

    @staticmethod
    def _report(thread: ThreadState, name: str, gradient: Tensor, now_ns: int) -> None:
        if len(thread.watched) >= MAX_WATCHED:
            return
        with without_torch_function():
            shape = shape_of(gradient)
        norms = norms_async([gradient], thread.scaling.scaler)
        thread.watched.append(PendingGradient(now_ns, name, shape, norms))


class _Leaf:
    """A watched leaf: it outlives the graph, so each name gets one hook."""

    __slots__ = ("handles", "tensor", "thread")

    def __init__(self, tensor: weakref.ref[Tensor], thread: ThreadState) -> None:
        self.tensor, self.thread = tensor, thread
        self.handles: dict[str, RemovableHandle] = {}

    def find_thread(self) -> ThreadState:
        """Return the state of the thread that last watched the leaf."""
        return self.thread

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles.values():
            handle.remove()
