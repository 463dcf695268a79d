"""Collectives of all process groups: what is sent, and how long it takes, by hooks of the groups (torch 2.14)."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Any

import torch

from torchotel._records import Collective
from torchotel._utils.faults import Guard
from torchotel.capture import torch_internals
from torchotel.capture.gradient_buckets import GradientBuckets

MAX_COLLECTIVES = 1 << 14
"""Collectives that wait for the end of their segment; of more, the oldest are left out of the trace and the metrics."""
MAX_GROUPS = 64
"""Groups with names of their own; a program that makes ever new groups has any number of them."""
OTHER_GROUPS = "other"
END_WAIT = timedelta(seconds=0.05)
"""Longest wait before the thread looks whether it shall end."""
ENDS_JOIN_S = 1.0
MAX_ENDS = 1024
"""Collectives that wait for their turn; the ends of more are not stamped."""

_OPERATIONS = {
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "all_reduce_coalesced",
    "ALLGATHER": "all_gather",
    "ALLGATHER_BASE": "all_gather_into_tensor",
    "ALLGATHER_COALESCED": "all_gather_coalesced",
    "ALLGATHER_INTO_TENSOR_COALESCED": "all_gather_into_tensor_coalesced",
    "REDUCE_SCATTER_BASE": "reduce_scatter_tensor",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all_single",
}
"""Names of operations in `torch.distributed`, if they differ from the hooks' names in lower case."""
_NAMES = {value: _OPERATIONS.get(name) or name.lower() for value, name in torch_internals.HOOKED_OPERATIONS.items()}
"""Names by the number of the operation: its name takes 2 µs to read."""
_SENDS = {"send", "recv"}


class OpenCollective:
    """A collective that may still run; `done` is called on another thread.

    Args:
        operation: The function of `torch.distributed`.
        group: The process group.
        size_bytes: Size of the input tensors of this rank, or of the output tensors if there are none.
        reports_end: Whether a wait ends when the collective is done, and not when a device has queued it.
    """

    __slots__ = (
        "_done_ns",
        "_issued_ns",
        "_sequence",
        "group",
        "modules",
        "operation",
        "reports_end",
        "size_bytes",
        "start_ns",
    )

    def __init__(self, operation: str, group: GroupHooks, size_bytes: int, *, reports_end: bool) -> None:
        self.operation, self.group, self.size_bytes, self.reports_end = operation, group, size_bytes, reports_end
        self.modules: tuple[str, ...] = ()  # of a bucket of gradients
        self._sequence = self._done_ns = 0
        self.start_ns = self._issued_ns = perf_counter_ns()

    def issued(self, sequence: int) -> None:
        """Note that the call has issued it."""
        self._issued_ns, self._sequence = perf_counter_ns(), sequence

    def done(self) -> None:
        """Note that it is done."""
        self._done_ns = perf_counter_ns()

    def ready(self) -> bool:
        """Return whether the end is known, or will never be known."""
        return self._done_ns > 0 or not self.reports_end

    def record(self) -> Collective:
        """Return it as a record."""
        return Collective(
            self.operation, self.group.name, self.group.ranks, self.size_bytes, self._sequence,
            self.start_ns, self._issued_ns, self._done_ns, self.modules,
        )  # fmt: skip


class CollectiveEnds:
    """Wait for collectives one after the other, and stamp their ends.

    A callback of the future would run on a thread of gloo. While the program holds the GIL, that thread could run no
    other collective, and other ranks would wait for it; and at the end of the process it would call into an interpreter
    that is gone. A work is kept until it is done, as its backend keeps it.
    """

    def __init__(self) -> None:
        self._works: SimpleQueue[tuple[Any, OpenCollective] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_ended = False

    def add(self, work: Any, collective: OpenCollective) -> None:
        """Stamp the end of a collective when it is done; may start the thread.

        Args:
            work: The work of the collective. A send or a receive may be waited for only once, by the program.
            collective: Gets its end on the thread.
        """
        if self._thread is None and not self._has_ended:
            self._thread = threading.Thread(target=self._run, name="torchotel-collectives", daemon=True)
            self._thread.start()
        if self._works.qsize() < MAX_ENDS:
            self._works.put((work, collective))

    def stop(self) -> None:
        """End the thread."""
        self._has_ended = True
        thread, self._thread = self._thread, None
        if thread is not None:
            self._works.put(None)
            thread.join(ENDS_JOIN_S)

    def _run(self) -> None:
        while (entry := self._works.get()) is not None and not self._has_ended:
            work, collective = entry
            if not torch_internals.may_be_waited_for_again(work):
                collective.reports_end = False
            while collective.reports_end and not self._has_ended:
                try:
                    work.wait(END_WAIT)
                except RuntimeError:  # it takes longer, or has failed, which the program's own wait raises
                    if not work.is_completed():
                        continue
                collective.done()
                break
            del entry, work  # it has tensors


class GroupHooks:
    """The hooks of one process group, which stay until the group is destroyed or the process ends.

    torch 2.15 crashes if a group gets or loses a hook while another thread runs a collective of it, and if a group that
    has hooks outlives the interpreter. Without a listener the hooks only count.

    Args:
        group: The group, to which no reference is kept.
        name: Its name in spans and metrics.
    """

    def __init__(self, group: Any, name: str) -> None:
        self.name, self.ranks = name, int(group.size())
        self.listener: Collectives | None = None
        self.process_group = weakref.ref(group)
        self.is_gloo = torch_internals.backend_of(group) == "gloo"
        self._open: dict[int, OpenCollective] = {}
        self.count = torch_internals.sequence_of(group) or 0
        """Collectives so far, without sends and receives; gloo's own number includes them on the two ranks."""
        self.remove = torch_internals.add_collective_hooks(group, self._begins, self._issued)

    def _begins(self, arguments: Any) -> None:
        """Note a collective before it is issued; runs in the program's call, and never raises."""
        listener = self.listener
        if listener is None:
            return
        try:
            operation = _NAMES[arguments.name.value]
            tensors: Sequence[torch.Tensor] = arguments.input_tensors or arguments.output_tensors
            reports_end = self.is_gloo and operation not in _SENDS and (not tensors or tensors[0].is_cpu)
            size_bytes = sum([tensor.nbytes for tensor in tensors])
            if len(self._open) > MAX_COLLECTIVES:  # their calls raised
                self._open.clear()
            self._open[arguments.op_id] = OpenCollective(operation, self, size_bytes, reports_end=reports_end)
        except Exception:  # noqa: BLE001  # it would reach the program's collective
            listener.guard.fault()

    def _issued(self, arguments: Any) -> None:
        """Note a collective after it was issued, which a wrong call is not; as `_begins`."""
        listener = self.listener
        try:
            collective = self._open.pop(arguments.op_id, None)
            operation = _NAMES[arguments.name.value] if collective is None else collective.operation
            is_send = operation in _SENDS
            self.count += not is_send
            if collective is not None and listener is not None:
                number = self.count if self.is_gloo else torch_internals.sequence_of(self.process_group())
                collective.issued(0 if is_send else number or 0)
                listener.issued.append(collective)
                if collective.reports_end and (work := arguments.work) is not None:
                    listener.ends.add(work, collective)
        except Exception:  # noqa: BLE001  # it would reach the program's collective
            if listener is not None:
                listener.guard.fault()


_hooked: weakref.WeakKeyDictionary[Any, GroupHooks] = weakref.WeakKeyDictionary()
"""The process groups that have hooks."""


@atexit.register
def _remove_hooks() -> None:
    for hooks in list(_hooked.values()):
        if hooks.listener is not None:
            hooks.listener.ends.stop()
        hooks.remove()


def collectives_run(group: Any) -> int | None:
    """Return how many collectives a process group has run, the same number on all of its ranks; None if unknown.

    This is the number of the backend. Gloo includes sends and receives, so its collectives are counted by hooks.
    """
    sequence = torch_internals.sequence_of(group)
    hooks = _hooked.get(group)
    return hooks.count if sequence is not None and hooks is not None and hooks.is_gloo else sequence


class Collectives:
    """Record the collectives of all process groups, also of those that are made later."""

    def __init__(self) -> None:
        self.guard = Guard("the collectives", off=self.uninstall)
        self.issued: deque[OpenCollective] = deque(maxlen=MAX_COLLECTIVES)
        """The collectives since the last `take`."""
        self.ends = CollectiveEnds()
        self.buckets = GradientBuckets()
        self._is_installed = False
        self._seen: tuple[object, int] = None, 0
        """What `groups_made` returned at the last look."""
        self._names: set[str] = set()

    def install(self) -> None:
        """Record from the next segment on."""
        self._is_installed, self._seen = torch_internals.GROUPS_HAVE_HOOKS, (None, 0)
        self.ends = CollectiveEnds()

    def uninstall(self) -> None:
        """Record no more."""
        self._is_installed = False
        for hooks in list(_hooked.values()):
            if hooks.listener is self:
                hooks.listener = None
        self.ends.stop()

    def watch_new_groups(self) -> None:
        """Listen to the groups that were made since the last call; cheap if there are none.

        Called by a thread that trains, between its collectives: a group may not get hooks while it runs one.
        """
        if not self._is_installed:
            return
        seen = torch_internals.groups_made()
        if seen != self._seen:
            self._seen = seen
            for group in torch_internals.process_groups():
                if group not in _hooked:
                    _hooked[group] = GroupHooks(group, self._name(group))
                _hooked[group].listener = self

    def take(self, end_ns: int) -> list[OpenCollective]:
        """Return the collectives that began by a time; later ones belong to the next segment."""
        taken = []
        with suppress(IndexError):  # there are no more; another thread may take some meanwhile
            while self.issued[0].start_ns <= end_ns:
                taken.append(self.issued.popleft())
        return taken

    def _name(self, group: Any) -> str:
        name = torch_internals.group_name(group)
        if name not in self._names and len(self._names) >= MAX_GROUPS:
            return OTHER_GROUPS
        self._names.add(name)
        return name
