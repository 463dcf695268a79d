"""An independent count of module calls, by a wrapper around `nn.Module.__call__`: nothing of torchotel."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._C._functorch import unwrap_if_dead
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from fidelity.subjects import tensors


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
    """Number after that of the last one; -1 while its forward runs."""
    inputs: list[torch.Size] = field(default_factory=list)
    """Shapes of the tensors that its forward took, those by keywords last: as they are when it ends."""
    outputs: list[torch.Size] | None = None
    """Shapes of the tensors that its forward gave out, before hooks of its own; None where it raised."""
    children: list["Call"] = field(default_factory=list)
    with_grad: bool = field(default_factory=torch.is_grad_enabled)


@dataclass
class Counted:
    """The calls of a training, in the order of their start."""

    calls: list[Call] = field(default_factory=list)
    runs: list[set[Call]] = field(default_factory=list)
    """Of each run of the autograd engine the calls that it goes through: those that made nodes of its graph."""
    in_part: bool = False
    """Whether a run was asked for some gradients only."""
    building: list[Call] = field(default_factory=list)
    """Those before the model stood, as parametrizations have them: where in the trace they are is not asked."""
    not_identical: list[str] = field(default_factory=list)
    """Identities that gave out another object than they took."""

    def built(self) -> None:
        """Begin with the training."""
        self.building, self.calls = self.calls, []

    def reach(self, roots: Iterable[Tensor | GradientEdge], ends: set[Node] | None) -> None:
        """Note the calls that a backward goes through, before it runs; it stops before nodes that are asked for."""
        nodes = {node for root in roots for node in nodes_of(root)}
        if ends is not None:
            self.in_part = True
            nodes = _leading(nodes, ends)
        numbers = sorted({node._sequence_nr() for node in nodes})
        self.runs.append({call for call in self.calls if call.last >= 0 and _any(numbers, call.first, call.last)})


def number() -> int:
    """Give the number that this thread's next autograd node will have."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]  # has no public form


def nodes_of(root: Tensor | GradientEdge) -> set[Node]:
    """Collect the graph of a loss or another root, without the nodes that accumulate into parameters."""
    first = root.node if isinstance(root, GradientEdge) else root.grad_fn
    assert first is not None
    seen: set[Node] = {first}
    todo = [first]
    while todo:
        fresh = {following for following, _ in todo.pop().next_functions if following is not None} - seen
        seen |= fresh
        todo += fresh
    return {node for node in seen if node._sequence_nr() < 2**63}


def _leading(nodes: Iterable[Node], ends: set[Node]) -> set[Node]:
    """Choose the nodes that lead to some."""
    leading: set[Node] = set()
    for node in sorted(nodes, key=lambda node: node._sequence_nr()):  # younger than those that it leads to
        if any(following in ends or following in leading for following, _ in node.next_functions):
            leading.add(node)
    return leading


def _made_by(inputs: Any) -> set[Node]:
    """Collect the nodes of tensors, or of edges of the graph that stand for them."""
    several = [inputs] if isinstance(inputs, Tensor | GradientEdge) else inputs
    edges = [one for one in several if isinstance(one, GradientEdge)]
    with torch.enable_grad():  # without which a leaf's can't be asked for
        # Nor can those of a transform of torch.func's that has ended.
        edges += [get_gradient_edge(one) for one in several if isinstance(one, Tensor) and unwrap_if_dead(one) is one]
    return {edge.node for edge in edges}


def _any(numbers: Sequence[int], first: int, last: int) -> bool:
    """Tell whether one of the numbers, which are sorted, is in a range."""
    place = bisect_left(numbers, first)
    return place < len(numbers) and numbers[place] < last


def _shapes(value: Any) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors(value)]


@contextmanager
def counting(see_roots: Callable[[Sequence[Tensor]], object] = lambda roots: None) -> Iterator[Counted]:
    """Count the calls of this thread in the block; `see_roots` gets what a backward starts from, before it runs."""
    counted, stack = Counted(), list[Call]()
    original: Callable[..., Any] = nn.Module.__call__
    engine = {name: getattr(torch.autograd, name) for name in ("backward", "grad")}

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            return original(module, *args, **kwargs)
        again = torch._C._current_graph_task_id() != -1
        # PyTorch runs global hooks before a module's own: what those call is called by the forward around.
        parent = next((outer for outer in reversed(stack) if outer.last < 0), None)
        this = Call(module, parent, again, number())
        counted.calls.append(this)
        if parent is not None:
            parent.children.append(this)
        stack.append(this)
        try:
            with _told_of_end(this):
                output = original(module, *args, **kwargs)
            if this.outputs is None:
                this.inputs, this.outputs = _shapes((args, kwargs)), _shapes(output)
        finally:
            stack.pop()
            if this.outputs is None:
                this.inputs = _shapes((args, kwargs))
        if isinstance(module, nn.Identity) and output is not args[0]:
            counted.not_identical.append(type(module).__qualname__)
        return output

    def run(name: str, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        several = outputs if isinstance(outputs, list) else [outputs]
        edges = [one for one in several if isinstance(one, GradientEdge)]  # a pipeline keeps those of released outputs
        roots = [*tensors([one for one in several if not isinstance(one, GradientEdge)])]
        inputs = args[0] if name == "grad" and args else kwargs.get("inputs")
        counted.reach([*roots, *edges], None if inputs is None else _made_by(inputs))
        see_roots(roots)
        return engine[name](outputs, *args, **kwargs)

    with ExitStack() as patches:
        patches.enter_context(patch.object(nn.Module, "__call__", call))
        for name in engine:
            patches.enter_context(patch.object(torch.autograd, name, partial(run, name)))
        yield counted


@contextmanager
def _told_of_end(call: Call) -> Iterator[None]:
    """Note the end of the call's forward; on a module with hooks of its own by one more, before those."""

    def ended(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call.last, call.inputs, call.outputs = number(), _shapes((args, kwargs)), _shapes(output)

    module = call.module  # of one with backward hooks, PyTorch makes another node when the forward hooks have run
    hooked = module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
    handle = module.register_forward_hook(ended, prepend=True, with_kwargs=True) if hooked else None
    try:
        yield
    finally:
        if call.last < 0:
            call.last = number()
        if handle is not None:
            handle.remove()
