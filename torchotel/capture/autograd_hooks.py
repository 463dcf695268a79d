"""Timestamps of the start and the end of a call's backward, by hooks on autograd nodes.

The start is a pre-hook on the nodes of the outputs. On one CPU thread nodes run in falling order of their sequence
numbers, so a call's backward is one run, and its end is a post-hook on the lowest node of the call that the outputs
reach. Without that order (several devices or threads, recomputation) the end is the latest of post-hooks on all nodes
that lead out of the call. A hook holds no node and no tensor, which would keep the graph alive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from time import perf_counter_ns
from typing import TypeAlias

from torch import Tensor
from torch.autograd.graph import Node
from torch.compiler import is_dynamo_compiling

from torchotel._limits import MAX_STEP_TIMESTAMPS
from torchotel._records import NO_SLOTS, NodeTimestamp, Slots
from torchotel.capture.torch_internals import LEAF_NUMBER, graph_task, node_number, node_of, sequence_number

MAX_NODES = 4096  # visited for one call; beyond it the call's end is that of its children
MAX_PATH = 1024  # of nodes in a cached path

DeviceTimestamp: TypeAlias = Callable[[int, int], None]
"""Records a slot and the graph task on the clock of a device."""

_next_slot = count().__next__  # unique in the process, so a graph that outlives its step never marks another call


@dataclass(slots=True, eq=False)
class RecordingSwitch:
    """Whether anything is recorded, and how much was left out.

    Hooks that are still running when capture ends ask it, and hooks of graphs that live on.
    """

    open: bool = False
    calls_dropped: int = 0
    timestamps_dropped: int = 0
    """Timestamps beyond `MAX_STEP_TIMESTAMPS`: a graph may run backward any number of times."""


class NodePath:
    """What is known of the nodes that a module's calls make.

    The cached path leads from the output's node to the call's lowest node: the index of each next function. Sequence
    numbers check it.
    """

    __slots__ = ("cached_path", "no_inplace_seen", "node_range", "offset", "probe_slot")

    def __init__(self) -> None:
        self.cached_path: tuple[int, ...] | None = None
        self.offset = self.node_range = 0
        self.probe_slot: int | None = None
        """The start of the backward that is to show whether an in-place operation replaces the output's node.

        Only an output that is a view of a tensor which the call made needs a probe.
        """
        self.no_inplace_seen = False
        """Whether the last probe has shown that none does."""


class TimestampLog:
    """A list of timestamps, which is written while the switch is open.

    Args:
        switch: Whether anything is recorded.
        fault: Called for an internal error, in its `except` block.
    """

    def __init__(self, switch: RecordingSwitch, fault: Callable[[], None]) -> None:
        self.timestamps: list[NodeTimestamp] = []
        self._switch, self.fault = switch, fault

    def add(self, slot: int, path: NodePath | None, on_device: DeviceTimestamp | None) -> None:
        """Append the current time; if it is that of the path's probe, no in-place operation replaced the node."""
        if not self._switch.open:
            return
        if len(self.timestamps) >= MAX_STEP_TIMESTAMPS:
            self._switch.timestamps_dropped += 1
            return
        self.timestamps.append((slot, perf_counter_ns(), graph_task()))
        if path is not None and path.probe_slot == slot:
            path.probe_slot, path.no_inplace_seen = None, True
        if on_device is not None:
            on_device(slot, graph_task())


class NodeHook:
    """A hook of an autograd node that records a timestamp.

    The hooks of a backward are made in its forward and live until then, so their number triggers garbage collections.
    This is one object; a closure is seven, and the collections took up to half of the recording time.
    """

    __slots__ = ("_log", "_on_device", "_path", "_slot")

    def __init__(self, log: TimestampLog, slot: int, path: NodePath | None, on_device: DeviceTimestamp | None) -> None:
        self._log, self._slot, self._path, self._on_device = log, slot, path, on_device

    def __call__(self, *_: object) -> None:
        """Record a timestamp, unless compiled autograd traces the hook: it guards on whatever is read first."""
        if is_dynamo_compiling():  # `is_compiling()` takes two calls
            return
        try:
            self._log.add(self._slot, self._path, self._on_device)
        except Exception:  # noqa: BLE001  # no internal error may reach the user's backward
            self._log.fault()


class BackwardTimestamps:
    """Hook the nodes of calls and keep the log that the hooks write to; one for each thread that runs forwards.

    Args:
        switch: Whether anything is recorded.
        fault: Called for an internal error, in its `except` block.
    """

    def __init__(self, switch: RecordingSwitch, fault: Callable[[], None]) -> None:
        self._switch, self._fault = switch, fault
        self.log = TimestampLog(switch, fault)
        """The log that the hooks write to."""
        self.on_device: DeviceTimestamp | None = None
        """Records the time on the device too, if the hooked call has a device clock."""
        self.borders: set[Node] = set()
        """Nodes of another thread that lead out of any call; kept while a root call runs."""
        self.starts: dict[int, int] = {}
        """Slots of the nodes that have a pre-hook, by sequence number."""
        self._spared: set[int] = set()
        """Sequence numbers in `starts` of outputs whose view needs no second pre-hook."""
        self._ends: dict[int, int] = {}

    def another(self) -> BackwardTimestamps:
        """Return a new object with a log of its own."""
        return BackwardTimestamps(self._switch, self._fault)

    def write_to_log_of(self, other: BackwardTimestamps) -> None:
        """Let hooks from now on write to another thread's log."""
        self.log = other.log

    def clear(self) -> None:
        """Forget which nodes are hooked: nodes are shared only within one root call."""
        self.starts.clear()
        self._spared.clear()
        self._ends.clear()

    def hook_single_output(self, output: Tensor, node: Node, first: int, path: NodePath) -> tuple[Slots, Slots]:
        """Hook a call with one output, in order; `first` is the number of the first node that it could make."""
        number = node_number(node)
        if number < first:
            return NO_SLOTS, NO_SLOTS  # the call returned its input: it has no node of its own
        start = self._start_of(output, node, number, first, path)
        end = self._ends.get(first)  # a child made the first node, so its end is the call's end
        if end is None:
            end = self._lowest(node, number, first, path)
        return start, NO_SLOTS if end is None else end

    def hook_outputs(self, outputs: list[Tensor], first: int, path: NodePath) -> tuple[Slots, Slots]:
        """Hook a call with several outputs, in order: the earliest start and the latest end count."""
        starts: list[int] = []
        ends: list[int] = []
        for output in outputs:
            node = node_of(output)
            if node is not None:
                start, end = self.hook_single_output(output, node, first, path)
                starts += _as_list(start)
                ends += _as_list(end)
        return tuple(dict.fromkeys(starts)), tuple(dict.fromkeys(ends))

    def hook_output_nodes(self, outputs: list[Tensor]) -> tuple[Slots, Slots]:
        """Hook only the output nodes, if torch has no sequence numbers: exact for calls of one node."""
        nodes = {n for t in outputs if (n := node_of(t)) is not None}
        if not nodes:
            return NO_SLOTS, NO_SLOTS
        start, end = _next_slot(), _next_slot()
        for node in nodes:
            node.register_prehook(self._hook(start))
            node.register_hook(self._hook(end))
        return start, end

    def hook_boundary_nodes(self, outputs: list[Tensor], inputs: list[Tensor], first: int) -> tuple[Slots, Slots]:
        """Hook every node that leads out of the call; the end is the latest of them."""
        nodes = {n for t in outputs if (n := node_of(t)) is not None and node_number(n) >= first}
        stops = {n for t in inputs if (n := node_of(t)) is not None}  # numbers of another thread may be in range, too
        stops |= self.borders
        stops -= {n for n in nodes & stops if _is_made(n)}  # an input that was changed in place
        nodes -= stops
        if not nodes:
            return NO_SLOTS, NO_SLOTS
        start, end = _next_slot(), _next_slot()
        seen = set(nodes)
        todo = list(seen)
        for node in todo:
            node.register_prehook(self._hook(start))
        while todo:
            node = todo.pop()
            inner = [
                n
                for n, _ in node.next_functions
                if n is not None and n not in stops and first <= node_number(n) < LEAF_NUMBER
            ]
            if not inner:
                node.register_hook(self._hook(end))
            fresh = [n for n in inner if n not in seen]
            if len(seen) + len(fresh) > MAX_NODES:
                return start, NO_SLOTS
            seen.update(fresh)
            todo += fresh
        return start, end

    def _start_of(self, output: Tensor, node: Node, number: int, first: int, path: NodePath) -> Slots:
        """Hook the output's node, and if the output is a view of a tensor that the call made, the node of that tensor.

        An in-place operation on such an output gives it a new node, and the old node never runs. If the output's node
        of the module's probed call did run, the next call is expected to have no in-place operation and is the probe.
        """
        own = self.starts.get(number)
        if own is not None and number in self._spared:
            return own  # the last child's output is the call's output
        if own is None and path.no_inplace_seen:
            path.no_inplace_seen = False
            self._spared.add(number)
            return self._start(node, number, path)
        if not output._is_view() or (base := output._base) is None or (made := base.grad_fn) is None:
            return self._start(node, number)
        base_number = node_number(made)
        if not number != base_number >= first:
            return self._start(node, number)
        return self._start(node, number, path if path.probe_slot is None else None), self._start(made, base_number)

    def _start(self, node: Node, number: int, path: NodePath | None = None) -> int:
        slot = self.starts.get(number)
        if slot is None:
            slot = self.starts[number] = _next_slot()
            if path is not None:
                path.probe_slot = slot
            node.register_prehook(self._hook(slot, path))
        return slot

    def _lowest(self, node: Node, number: int, first: int, path: NodePath) -> int | None:
        """Hook the call's lowest node that `node` reaches, and return the slot of its end."""
        lowest = node if number == first else _follow(node, number, first, path) or _walk(node, number, first, path)
        if lowest is None:
            return None
        if lowest is not node:
            number = node_number(lowest)
        slot = self._ends.get(number)
        if slot is None:
            slot = self._ends[number] = _next_slot()
            lowest.register_hook(self._hook(slot))
        return slot

    def _hook(self, slot: int, path: NodePath | None = None) -> NodeHook:
        return NodeHook(self.log, slot, path, self.on_device)


def _is_made(node: Node) -> bool:
    """Return whether this thread may have made a node: its sequence number was given out on this thread."""
    return sequence_number is None or node_number(node) < sequence_number()


def _as_list(slots: Slots) -> list[int]:
    return [slots] if isinstance(slots, int) else list(slots)


def _follow(node: Node, number: int, first: int, path: NodePath) -> Node | None:
    """Follow the cached path of the module's last call, checked by sequence numbers."""
    if path.cached_path is None or number - first != path.node_range:
        return None
    found: Node | None = node
    for index in path.cached_path:
        following = found.next_functions  # type: ignore[union-attr] # checked below
        if index >= len(following) or (found := following[index][0]) is None:
            return None
    return found if node_number(found) - first == path.offset else None  # type: ignore[arg-type] # not None


def _walk(node: Node, number: int, first: int, path: NodePath) -> Node | None:
    """Search all nodes of the call for the lowest and cache the path to it; return None if there are too many."""
    best, best_number = node, number
    came_from: dict[Node, tuple[Node, int]] = {}
    todo, seen = [node], {node}
    while todo:
        current = todo.pop()
        for index, (following, _) in enumerate(current.next_functions):
            if following is None or following in seen:
                continue
            following_number = node_number(following)
            if first <= following_number < LEAF_NUMBER:
                if len(seen) >= MAX_NODES:
                    return None
                seen.add(following)
                came_from[following] = (current, index)
                todo.append(following)
                if following_number < best_number:
                    best, best_number = following, following_number
    indices: list[int] = []
    step = best
    while step is not node:
        step, index = came_from[step]
        indices.append(index)
    path.cached_path = tuple(reversed(indices)) if len(indices) <= MAX_PATH else None
    path.offset, path.node_range = best_number - first, number - first
    return best
