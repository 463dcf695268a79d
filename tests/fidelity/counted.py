"""An independent count of module calls, by a wrapper around `nn.Module.__call__`: no hook, nothing of torchotel."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node


@dataclass(eq=False)
class Call:
    """One module call, as its caller saw it."""

    module: nn.Module
    parent: "Call | None"
    in_backward: bool
    """Run again by activation checkpointing."""
    first: int
    """Number of the first autograd node that it could make."""
    last: int = -1
    """Number after that of the last one."""
    children: list["Call"] = field(default_factory=list)
    backward: bool = False
    """Whether the loss's graph has nodes that were made in it."""


@dataclass
class Counted:
    """The calls of a training, in the order of their start."""

    calls: list[Call] = field(default_factory=list)
    not_identical: list[str] = field(default_factory=list)
    """Identities that gave out another object than they took."""

    def reach(self, loss: Tensor) -> None:
        """Mark the calls that the loss's backward goes through; to be called before it, for each step."""
        numbers = sorted(node._sequence_nr() for node in nodes_of(loss))
        for call in self.calls:
            if call.last >= 0 and not call.backward:
                call.backward = any(call.first <= number < call.last for number in numbers)


def number() -> int:
    """Give the number that this thread's next autograd node will have."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]  # has no public form


def nodes_of(loss: Tensor) -> set[Node]:
    """Collect the graph of a loss, without the nodes that accumulate into parameters."""
    assert loss.grad_fn is not None
    seen: set[Node] = {loss.grad_fn}
    todo = [loss.grad_fn]
    while todo:
        fresh = {following for following, _ in todo.pop().next_functions if following is not None} - seen
        seen |= fresh
        todo += fresh
    return {node for node in seen if node._sequence_nr() < 2**63}


@contextmanager
def counting() -> Iterator[Counted]:
    """Count the calls of this thread in the block."""
    counted, stack = Counted(), list[Call]()
    original: Callable[..., Any] = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        again = torch._C._current_graph_task_id() != -1
        this = Call(module, stack[-1] if stack else None, again, number())
        counted.calls.append(this)
        if this.parent is not None:
            this.parent.children.append(this)
        stack.append(this)
        try:
            output = original(module, *args, **kwargs)
        finally:
            stack.pop()
            this.last = number()
        if isinstance(module, nn.Identity) and output is not args[0]:
            counted.not_identical.append(type(module).__qualname__)
        return output

    with patch.object(nn.Module, "__call__", call):
        yield counted
