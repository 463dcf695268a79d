"""DataParallel's replicas: copies that are made for one forward, each called in a thread of its own.

Their calls belong to the forward that waits for those threads, under the names of what was copied.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch.nn import Module

from torchotel._records import CallNote, ModuleCall
from torchotel.capture.paths import Paths, Place
from torchotel.capture.seams import made_for_replica, node_of
from torchotel.capture.sites import info_of
from torchotel.capture.tree import modules_of, unwrapped

if TYPE_CHECKING:
    from torchotel.capture.thread import ThreadState


def join_forward(thread: ThreadState, replica: Module, threads: Iterable[ThreadState], paths: Paths) -> bool:
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


def _name(replica: Module, original: Module, paths: Paths) -> None:
    """Call a replica, and all below it, what their originals are called, whether what holds them lives on or not."""
    for copy, copied in zip(modules_of(replica), modules_of(original), strict=False):
        known = paths.states.get(id(copied))
        if known is None or type(copy) is not type(copied):
            return
        state = paths.add(copy, Place(known.model, known.path, None, "", known.root))
        state.info, state.sites = info_of(known, copied), known.sites
