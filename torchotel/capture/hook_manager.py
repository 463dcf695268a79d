"""Installs the global module hooks on detailed steps, and a one-shot pre-hook between them.

Even a hook that returns at once costs 6 to 8 µs a call in a real model, so between detailed steps inner calls run no
hook. A one-shot pre-hook then sees the start of the next root call, and a hook on that module, for that call only, its
end.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from torchotel.capture.torch_internals import (
    ENDS_ARE_SEEN,
    forget_end,
    forget_kwargs_hook,
    hooks_of,
    new_hook_id,
    see_end,
)

if TYPE_CHECKING:
    from torchotel.capture.thread_state import ThreadState

Hook = Callable[..., None]

UNHOOKED = (nn.TransformerEncoderLayer, torch.jit.ScriptModule)
"""Modules that get no hook: `TransformerEncoderLayer` would leave its fused path, a scripted module takes no hook."""


def _nothing(*_: object) -> None:
    pass


class ExitHook(partial[None]):
    """A hook that does nothing after it was copied or unpickled.

    Programs save a model when they catch an interrupt of its forward; the hook of that call is then still on it.
    """

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # takes three arguments, returns None, and needs no torchotel


class PreHook:
    """One entry among PyTorch's global forward pre-hooks, which holds one of several hooks or none.

    PyTorch snapshots the hook dictionary for each call, so two of these hooks must never be registered at once. The
    first hook is registered through PyTorch. Later ones replace it in PyTorch's dictionary, which takes a third of the
    time. If that dictionary is not found, each hook is registered again, and a call on another thread may run both.
    """

    def __init__(self) -> None:
        self._id = -1
        self._hooks: dict[int, Hook] = {}
        self._remove: Callable[[], None] | None = None
        """Removes the hook if PyTorch's dictionary is not known."""
        self.hook: Hook | None = None
        """The installed hook; compared after every event."""

    def install(self, hook: Hook) -> None:
        """Install a hook in place of the installed one."""
        if self.hook is hook:
            return
        if self._id >= 0:
            self._hooks[self._id] = hook
        else:
            self._register(hook)
        self.hook = hook

    def remove(self) -> None:
        """Remove the installed hook."""
        self.hook = None
        self._hooks.pop(self._id, None)
        if self._remove is not None:
            self._remove()
            self._remove = None

    def _register(self, hook: Hook) -> None:
        handle = register_module_forward_pre_hook(hook)
        hooks = hooks_of(handle)
        if hooks is not None:
            self._id, self._hooks = handle.id, hooks
            return
        if self._remove is not None:  # after the new hook is in: another thread may begin a forward in between
            self._remove()
        self._remove = handle.remove


class ExitWatch:
    """The root call of one thread whose end is seen by a hook on its module."""

    __slots__ = ("call", "module")

    def __init__(self) -> None:
        self.module: weakref.ref[Module] | None = None
        """None: no hook is on a module for this thread."""
        self.call: int | None = None
        """Identifies the call: the module may call itself."""


class ModuleHooks:
    """Install and remove the global module hooks."""

    def __init__(self) -> None:
        self._before = self._after = self._root_start = _nothing
        self._pre_hook = PreHook()
        self._after_handle: RemovableHandle | None = None
        self._exit, self._exit_id = ExitHook(_nothing), new_hook_id()
        self._detailed: set[ThreadState] = set()  # threads whose step is recorded in detail
        self._wanted = self._armed = self._installed = False
        self._suspended = 0
        self.renew_lock()

    def renew_lock(self) -> None:
        """Replace the lock in a forked child: a thread of the parent may have held it."""
        # Reentrant: a signal handler may shut everything down while the lock is held.
        self._lock = threading.RLock()

    def install(self, before: Hook, after: Hook, root_start: Hook, root_end: Hook) -> None:
        """Install the one-shot pre-hook for the next root call.

        Args:
            before: Runs before every module call of a detailed step.
            after: Runs after every module call of a detailed step.
            root_start: Runs before the next root call of other steps.
            root_end: Runs after that root call.
        """
        self._before, self._after, self._root_start, self._exit = before, after, root_start, ExitHook(root_end)
        self._installed = True
        self._suspended = 0  # a compilation that ran during `remove` calls no `resume`
        self.arm()

    @property
    def all_in(self) -> bool:
        """Whether the hooks of every module call are installed."""
        return self._after_handle is not None

    def set_detailed(self, thread: ThreadState, *, detailed: bool) -> bool:
        """Set whether the thread's calls are recorded in detail; return whether all calls are seen."""
        if not (detailed or self._detailed or self._wanted):
            return False  # most calls
        if detailed:
            self._detailed.add(thread)
        else:
            self._detailed.discard(thread)
        self._wanted = len(self._detailed) > 0
        self._apply()
        return self.all_in

    def release(self, thread: ThreadState) -> None:
        """Stop recording the thread's calls in detail; the hooks are removed at the next root call of any thread.

        They are not removed at once: after a call that raised, on any thread, PyTorch iterates over them.
        """
        self._detailed.discard(thread)

    def remove_thread(self, thread: ThreadState) -> None:
        """Forget a thread that has ended."""
        self._detailed.discard(thread)
        self._wanted = len(self._detailed) > 0
        self._apply()

    def arm(self) -> None:
        """Install the one-shot pre-hook, unless the hooks of every call are installed."""
        self._armed = True
        if self._pre_hook.hook is not self._root_start:  # after most events it is
            self._apply()

    def disarm(self) -> None:
        """Remove the one-shot pre-hook: the root call has begun."""
        with self._lock:
            self._armed = False
            if self._pre_hook.hook is self._root_start:
                self._pre_hook.remove()

    def suspend(self) -> None:
        """Remove all hooks while Dynamo compiles or export traces, so that Dynamo makes no guards for them."""
        with self._lock:  # regions of several threads begin and end at once
            self._suspended += 1
            self._apply()

    def resume(self) -> None:
        """Install the hooks that `suspend` removed."""
        with self._lock:
            self._suspended = max(0, self._suspended - 1)
            self._apply()

    def remove(self) -> None:
        """Remove all hooks, until the next `install`."""
        self._installed = False
        self._detailed.clear()
        self._wanted = self._armed = False
        self._apply()

    def watch_exit(self, thread: ThreadState, module: Module, call: int | None) -> bool:
        """Put a hook on the module of a root call to see the call's end; return False for a module that takes no hook.

        Args:
            thread: The calling thread's state.
            module: The module of the root call.
            call: Identifies the call.
        """
        if not ENDS_ARE_SEEN or isinstance(module, UNHOOKED):
            return False
        with self._lock:
            thread.exit_watch.module, thread.exit_watch.call = weakref.ref(module), call
            see_end(module, self._exit_id, self._exit)
        return True

    def unwatch_exit(self, thread: ThreadState, threads: Iterable[ThreadState]) -> None:
        """Remove that hook, unless one of the threads is inside a call of the same module.

        All threads share the hook: if a call of the module raised, PyTorch iterates over the module's hooks.
        """
        with self._lock:
            watched_root, thread.exit_watch.module = thread.exit_watch.module, None
            module = None if watched_root is None else watched_root()
            if module is None:
                return
            for other in threads:
                if other.exit_watch.module is not None and other.exit_watch.module() is module:
                    return
            forget_end(module, self._exit_id)

    def _apply(self) -> None:
        with self._lock:  # two threads may find no hooks installed
            free = self._installed and not self._suspended
            all_in = self._wanted and free
            if all_in and self._after_handle is None:
                self._after_handle = register_module_forward_hook(self._after, with_kwargs=True, always_call=True)
            if all_in:
                self._pre_hook.install(self._before)
            elif self._armed and free:
                self._pre_hook.install(self._root_start)
            else:
                self._pre_hook.remove()
            handle = self._after_handle
            if not all_in and handle is not None:
                self._after_handle = None
                handle.remove()
                forget_kwargs_hook(handle.id)
