"""Which hooks are in: all of them on detailed steps, otherwise one that takes itself out at its first call.

Even a hook that returns at once costs 6 to 8 µs a call in a real model, so between detailed steps there is none on the
inner calls. Then a one-shot pre-hook sees the start of the next outermost forward, and one hook on that module, for
that call only, its end.
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
"""The fused path of the one looks for hooks on modules, and numbers would change; the other takes none."""


def _nothing(*_: object) -> None:
    pass


class ExitHook(partial[None]):
    """A hook that copying and pickling turn into one that does nothing.

    A model is often saved where an interrupt of its forward is caught, and then the hook of that call is on it still.
    """

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # takes any three arguments, returns None, and is not ours


class PreHook:
    """One place among torch's global pre-hooks, where one of several hooks is in or none.

    In one place, since a call that begins on another thread takes all hooks of that moment along: never two of ours.
    Torch is asked once to register it; then it is put where torch has put it, for a third of the price. Where that is
    not known it is registered anew each time, and a call may take both along.
    """

    def __init__(self) -> None:
        self._id = -1
        self._hooks: dict[int, Hook] = {}
        self._remove: Callable[[], None] | None = None
        """Takes it out where it is not known where torch has put it."""
        self.hook: Hook | None = None
        """Which one is in; asked after every event."""

    def install(self, hook: Hook) -> None:
        """Put it in, in the place of what is there."""
        if self.hook is hook:
            return
        if self._id >= 0:
            self._hooks[self._id] = hook
        else:
            self._register(hook)
        self.hook = hook

    def remove(self) -> None:
        """Take out what is in."""
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
        if self._remove is not None:  # after the other is in: a thread may begin a forward in between
            self._remove()
        self._remove = handle.remove


class ExitWatch:
    """The root call of one thread whose end a hook on its module sees."""

    __slots__ = ("call", "module")

    def __init__(self) -> None:
        self.module: weakref.ref[Module] | None = None
        """None: no hook is on a module for this thread."""
        self.call: int | None = None
        """Identifies the call: the module may call itself."""


class ModuleHooks:
    """Put the global module hooks in and take them out."""

    def __init__(self) -> None:
        self._before = self._after = self._first = _nothing
        self._pre_hook = PreHook()
        self._after_handle: RemovableHandle | None = None
        self._exit, self._exit_id = ExitHook(_nothing), new_hook_id()
        self._detailed: set[ThreadState] = set()  # threads whose step is recorded in detail
        self._wanted = self._armed = self._installed = False
        self._suspended = 0
        self.renew_lock()

    def renew_lock(self) -> None:
        """Forget who held the lock: in a forked child it may be a thread that is not there."""
        # Reentrant: a signal's handler may run in the midst of it and shut everything down.
        self._lock = threading.RLock()

    def install(self, before: Hook, after: Hook, first: Hook, left: Hook) -> None:
        """Begin, by waiting for the next outermost forward.

        Args:
            before: Runs before every module call of a detailed step.
            after: Runs after it.
            first: Runs once before the next module call, otherwise.
            left: Runs after that call.
        """
        self._before, self._after, self._first, self._exit = before, after, first, ExitHook(left)
        self._installed = True
        self._suspended = 0  # the end of a compilation in which we were taken out is never told
        self.arm()

    @property
    def all_in(self) -> bool:
        """Whether every module call is seen."""
        return self._after_handle is not None

    def set_detailed(self, thread: ThreadState, *, detailed: bool) -> bool:
        """Say whether the thread's calls are to be seen; return whether they are."""
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
        """Note that no more calls of the thread are to be seen: the hooks go at the next outermost call of any thread.

        Not now: where a call raised, on this thread or another, PyTorch reads them, and they must not change then.
        """
        self._detailed.discard(thread)

    def remove_thread(self, thread: ThreadState) -> None:
        """Take note that the thread has ended."""
        self._detailed.discard(thread)
        self._wanted = len(self._detailed) > 0
        self._apply()

    def arm(self) -> None:
        """Wait for the next outermost forward."""
        self._armed = True
        if self._pre_hook.hook is not self._first:  # after most events it is
            self._apply()

    def disarm(self) -> None:
        """Stop waiting: it has come."""
        with self._lock:
            self._armed = False
            if self._pre_hook.hook is self._first:
                self._pre_hook.remove()

    def suspend(self) -> None:
        """Take all hooks out while Dynamo compiles or export traces, so that no guard is made of them."""
        with self._lock:  # regions of several threads begin and end at once
            self._suspended += 1
            self._apply()

    def resume(self) -> None:
        """Put back what was in."""
        with self._lock:
            self._suspended = max(0, self._suspended - 1)
            self._apply()

    def remove(self) -> None:
        """Take all hooks out; what is still running cannot put them back."""
        self._installed = False
        self._detailed.clear()
        self._wanted = self._armed = False
        self._apply()

    def watch_exit(self, thread: ThreadState, module: Module, call: int | None, *, alone: bool = False) -> bool:
        """See the end of this one call of the outermost module; False where it must not have a hook.

        Args:
            thread: The calling one.
            module: The outermost one.
            call: Identifies the call.
            alone: Whether no other thread forwards: nothing is waited for until the end, as after `disarm`.
        """
        if not ENDS_ARE_SEEN or isinstance(module, UNHOOKED):
            return False
        with self._lock:
            if alone:
                self._armed = False
                if self._pre_hook.hook is self._first:
                    self._pre_hook.remove()
            thread.exit_watch.module, thread.exit_watch.call = weakref.ref(module), call
            see_end(module, self._exit_id, self._exit)
        return True

    def unwatch_exit(self, thread: ThreadState, threads: Iterable[ThreadState]) -> None:
        """Take that hook off, unless one of the threads is inside a call of the same module.

        It is one for all of them: where a call raised PyTorch reads the module's hooks, and they must not change then.
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
        with self._lock:  # of two threads that find no hooks in, one puts them there
            free = self._installed and not self._suspended
            all_in = self._wanted and free
            if all_in and self._after_handle is None:
                self._after_handle = register_module_forward_hook(self._after, with_kwargs=True, always_call=True)
            if all_in:
                self._pre_hook.install(self._before)
            elif self._armed and free:
                self._pre_hook.install(self._first)
            else:
                self._pre_hook.remove()
            handle = self._after_handle
            if not all_in and handle is not None:
                self._after_handle = None
                handle.remove()
                forget_kwargs_hook(handle.id)
