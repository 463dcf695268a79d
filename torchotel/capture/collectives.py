"""Collectives of all process groups: what is sent, and how long it takes, by hooks of the groups (torch 2.14)."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

import torch

from torchotel._records import Collective
from torchotel._utils.faults import Guard
from torchotel.capture import torch_internals
from torchotel.capture.torch_internals import Undo

MAX_COLLECTIVES = 1 << 14
"""Collectives that wait for the end of their segment; of more, the oldest are left out of the trace and the metrics."""
MAX_GROUPS = 64
"""Groups with names of their own; a program that makes ever new groups has any number of them."""
OTHER_GROUPS = "other"

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
"""Names of the hooks' operations in `torch.distributed`, where they are not the same in lower case."""
_SENDS = {"SEND", "RECV"}


class OpenCollective:
    """A collective that may still run; `done` is called on a thread of the backend.

    Args:
        operation: The function of `torch.distributed`.
        group: The process group.
        size_bytes: Size of the tensors that this rank gives, or receives if it gives none.
        tells_end: Whether the backend tells when the collective is done, and not only when a device has queued it.
    """

    __slots__ = ("_done_ns", "_group", "_issued_ns", "_operation", "_sequence", "_size_bytes", "_start_ns", "tells_end")

    def __init__(self, operation: str, group: GroupHooks, size_bytes: int, *, tells_end: bool) -> None:
        self._operation, self._group, self._size_bytes, self.tells_end = operation, group, size_bytes, tells_end
        self._sequence = self._done_ns = 0
        self._start_ns = self._issued_ns = perf_counter_ns()

    def issued(self, sequence: int) -> None:
        """Note that the call has issued it."""
        self._issued_ns, self._sequence = perf_counter_ns(), sequence

    def done(self, _: object) -> None:
        """Note that it is done; gets the future of the work, and keeps nothing of it."""
        self._done_ns = perf_counter_ns()

    def record(self) -> Collective:
        """Return it as a record."""
        group = self._group
        return Collective(
            self._operation, group.name, group.ranks, self._size_bytes, self._sequence,
            self._start_ns, self._issued_ns, self._done_ns,
        )  # fmt: skip


class GroupHooks:
    """The hooks of one process group.

    Args:
        group: The group, to which no reference is kept.
        name: Its name in spans and metrics.
        collect: Gets each collective when it is issued.
    """

    def __init__(self, group: Any, name: str, collect: Callable[[OpenCollective], None]) -> None:
        self.name, self.ranks, self._collect = name, int(group.size()), collect
        self._group = weakref.ref(group)
        self._on_cpu = torch_internals.backend_of(group) == "gloo"
        self._open: dict[int, OpenCollective] = {}
        self.sent_or_received = 0
        """Sends and receives that are in the numbers of the group's collectives."""

    def begins(self, arguments: Any) -> None:
        """Note a collective before it is issued; runs in the program's call."""
        operation: str = arguments.name.name
        if self._on_cpu and operation in _SENDS:
            self.sent_or_received += 1
        tensors: Sequence[torch.Tensor] = arguments.input_tensors or arguments.output_tensors
        tells_end = tensors[0].is_cpu if tensors else self._on_cpu
        size_bytes = sum([tensor.nbytes for tensor in tensors])
        name = _OPERATIONS.get(operation) or operation.lower()
        self._open[arguments.op_id] = OpenCollective(name, self, size_bytes, tells_end=tells_end)

    def issued(self, arguments: Any) -> None:
        """Note a collective after it was issued; runs in the program's call."""
        collective = self._open.pop(arguments.op_id, None)
        if collective is None:
            return
        collective.issued(torch_internals.sequence_of(self._group()))
        self._collect(collective)
        if collective.tells_end and (work := arguments.work) is not None:
            work.get_future().add_done_callback(collective.done)
        if len(self._open) > MAX_COLLECTIVES:  # those that raised
            self._open.clear()


class Collectives:
    """Record the collectives of all process groups, also of those that are made later."""

    def __init__(self) -> None:
        self.guard = Guard("the collectives", off=self.uninstall)
        """An exception in a hook would reach the program's collective."""
        self._issued: deque[OpenCollective] = deque(maxlen=MAX_COLLECTIVES)
        self._known: weakref.WeakKeyDictionary[Any, GroupHooks] = weakref.WeakKeyDictionary()
        self._undos: list[Undo] = []
        self._groups_made = 0
        self._names: set[str] = set()
        self._is_installed = False

    def install(self) -> None:
        """Watch all groups from now on."""
        self._is_installed = torch_internals.GROUPS_HAVE_HOOKS
        self.watch_new_groups()

    def uninstall(self) -> None:
        """Remove the hooks of all groups."""
        self._is_installed, self._groups_made = False, 0
        undos, self._undos = self._undos, []
        for undo in undos:
            undo()
        self._known.clear()

    def watch_new_groups(self) -> None:
        """Add hooks to the groups that have none; cheap if there is no new one."""
        made = torch_internals.groups_made()
        if made == self._groups_made or not self._is_installed:
            return
        self._groups_made = made
        for group in torch_internals.process_groups():
            if group not in self._known:
                hooks = self._known[group] = GroupHooks(group, self._name(group), self._issued.append)
                begins, issued = self.guard.guarded(hooks.begins), self.guard.guarded(hooks.issued)
                self._undos.append(torch_internals.around_collectives(group, begins, issued))

    def sent_or_received(self) -> int:
        """Return how many sends and receives the number of the default group's collectives includes."""
        group = torch_internals.default_group()
        hooks = None if group is None else self._known.get(group)
        return 0 if hooks is None else hooks.sent_or_received

    def take(self) -> list[OpenCollective]:
        """Return the collectives since the last call."""
        taken = []
        while self._issued:
            taken.append(self._issued.popleft())
        return taken

    def _name(self, group: Any) -> str:
        name = torch_internals.group_name(group)
        if name not in self._names and len(self._names) >= MAX_GROUPS:
            return OTHER_GROUPS
        self._names.add(name)
        return name
