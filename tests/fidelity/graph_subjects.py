"""Graphs made in unusual ways: functions with backwards of their own, hooks, saved tensors, checkpoints, subclasses."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop
from torch.utils.hooks import RemovableHandle

from fidelity.forward_subjects import Forward, Tagged, model_of
from fidelity.layer_subjects import SIDE, subject
from fidelity.subjects import Subject


class Once(torch.autograd.Function):
    """Can't be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.exp(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * torch.exp(x)


class Unmaterialized(torch.autograd.Function):
    """Gets None for the output that the loss leaves out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor | None:
        one, other = gradients
        assert other is None
        return one


class InPlace(torch.autograd.Function):
    """Changes what it takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class Ranked(torch.autograd.Function):
    """Gives out places too, which have no gradient, and keeps apart what its backward needs."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = x.sort(1)
        return values, places

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (places,) = ctx.saved_tensors
        return torch.zeros_like(gradients[0]).scatter(1, places, gradients[0])


class Applying(nn.Module):
    """A function as a module, so that its nodes are the module's."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        """Apply it."""
        return self.function(x)


def subjects() -> Iterator[Subject]:
    """Yield all of them."""
    kinds = {"functions": _functions(), "hooks": _hooks(), "modes": _modes(), "checkpoints": _checkpoints()}
    for kind, forwards in kinds.items():
        for name, run in forwards.items():
            timed = run is not _dual  # whose backward is through tangents too, which no module gives out
            yield subject(f"graphs with {kind}", name, partial(model_of, run), timed=timed)
    of = partial(subject, "graphs with tensor subclasses")
    yield of("two tensors in one", partial(model_of, _plain), inputs=_two, norms=False)
    yield of("parameters", partial(_tagged, _plain))
    yield of("meta tensors", partial(model_of, _plain), device="meta")


def _plain(m: Any, x: Tensor) -> Any:
    return m.b(m.a(x))


def _functions() -> dict[str, Forward]:
    def applied(function: Callable[[Tensor], Any]) -> Forward:
        module = Applying(function)
        return lambda m, x: m.b(module(m.a(x)))

    return {
        "once differentiable": applied(Once.apply),
        "without materialized gradients": applied(lambda x: Unmaterialized.apply(x)[0]),
        "that mark dirty": applied(lambda x: InPlace.apply(x * 1)),
        "with an output that has no gradient": applied(lambda x: Ranked.apply(x)[0]),
    }


def _hooks() -> dict[str, Forward]:
    def come_and_go(m: Any, x: Tensor) -> Any:
        handles = [
            m.a.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
            m.a.register_forward_hook(lambda module, args, output: output + 1),
        ]
        y = m.a(x)
        for handle in handles:
            handle.remove()
        return m.b(m.a(y))

    def remove_themselves(m: Any, x: Tensor) -> Any:
        handle: RemovableHandle = m.a.register_forward_hook(lambda *_: handle.remove())
        return m.b(m.a(m.a(x)))

    def backward(m: Any, x: Tensor) -> Any:
        before = m.a.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 2,))
        after = m.choices.left.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] + 1,))
        y = m.b(m.choices.left(m.a(x)))
        before.remove()
        after.remove()
        return y

    def on_tensors(m: Any, x: Tensor) -> Any:
        y = m.a(x)
        y.retain_grad()
        y.register_hook(lambda gradient: gradient * 3).remove()
        y.register_hook(lambda gradient: gradient * 2)
        y.grad_fn.register_prehook(lambda gradients: (gradients[0] + 1,))
        y.grad_fn.register_hook(lambda inputs, outputs: None)
        return m.b(y)

    def on_several(m: Any, x: Tensor) -> Any:
        y, z = m.a(x), m.choices.left(x)
        torch.autograd.graph.register_multi_grad_hook([y, z], lambda gradients: None)
        return m.b(y) + z

    return {
        "that come and go": come_and_go,
        "that remove themselves": remove_themselves,
        "on a module's gradients": backward,
        "on tensors and nodes": on_tensors,
        "on several tensors": on_several,
    }


def _modes() -> dict[str, Forward]:
    def within(*contexts: Callable[[], Any]) -> Forward:
        def run(m: Any, x: Tensor) -> Any:
            y = m.a(x)
            for context in contexts:
                with context():
                    y = m.b(y)
            return m.choices.left(y)

        return run

    def inferred(m: Any, x: Tensor) -> Any:
        with torch.inference_mode():
            y = m.b(x)
        return m.a(y.clone())

    def enabled(m: Any, x: Tensor) -> Any:
        with torch.no_grad():
            y = m.a(x)
            with torch.enable_grad():
                z = m.b(y)
            return z, m.choices.left(y)

    saved = torch.autograd.graph.saved_tensors_hooks
    return {
        "saved tensors that are changed": within(lambda: saved(torch.clone, torch.clone)),
        "saved tensors on the CPU": within(torch.autograd.graph.save_on_cpu),
        "inference mode within": inferred,
        "gradients within none": enabled,
        "forward mode": _dual,
    }


def _dual(m: Any, x: Tensor) -> Any:
    with forward_ad.dual_level():
        y = m.choices.left(torch.tanh(m.a(forward_ad.make_dual(x, torch.ones_like(x)))))
        return forward_ad.unpack_dual(y)


def _checkpoints() -> dict[str, Forward]:
    def several(m: Any, x: Tensor, *, reentrant: bool) -> Any:
        y, _, z = checkpoint(lambda x, y: (m.b(x), 1, m.choices.left(y)), m.a(x), x, use_reentrant=reentrant)
        return y + z

    def deep(m: Any, x: Tensor, depth: int = 3, *, reentrant: bool) -> Any:
        if not depth:
            return m.b(x)
        return checkpoint(lambda x: m.a(deep(m, x, depth - 1, reentrant=reentrant)), x, use_reentrant=reentrant)

    def whole(m: Any, x: Tensor) -> Any:
        with set_checkpoint_early_stop(False):
            return checkpoint(m.b, m.a(x), use_reentrant=False)

    def cast(m: Any, x: Tensor, *, reentrant: bool) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(m.b, m.a(x), use_reentrant=reentrant)

    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    ways: dict[str, Forward] = {
        "selective": lambda m, x: checkpoint(m.choices.left, m.a(x), use_reentrant=False, context_fn=contexts),
        "to the end": whole,
        "by keywords": lambda m, x: checkpoint(lambda *, x: m.b(x), x=m.a(x), use_reentrant=False),
    }
    for reentrant in (False, True):
        how = f"{'' if reentrant else 'not '}reentrant"
        ways[f"of several inputs, {how}"] = partial(several, reentrant=reentrant)
        ways[f"three deep, {how}"] = lambda m, x, reentrant=reentrant: deep(m, m.a(x), reentrant=reentrant)
        ways[f"in autocast, {how}"] = partial(cast, reentrant=reentrant)
    return ways


def _two() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (TwoTensor(torch.randn(3, SIDE), torch.randn(3, SIDE)),), {}


def _tagged(run: Forward) -> nn.Module:
    model = model_of(run)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().as_subclass(Tagged)))
    return model
