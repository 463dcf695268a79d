"""Hooks that the user has put in, of every kind: they fire as ever, and what they change stays changed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support import PROGRAMS, commands
from support.recorded_training import recorded
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")

DETAILS = ["all", "off"]
"""Our hooks are in, or out but for one that comes and goes."""

Event = tuple[str, ...]
Handles = list[RemovableHandle]


class Net(nn.Module):
    """Two layers, with a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.act = nn.ReLU()
        self.second = nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.zeros(2))

    def forward(self, x: Tensor, *, gain: float = 1.0) -> Tensor:
        output: Tensor = self.second(self.act(self.first(x)))
        return output * self.scale * gain + self.get_buffer("shift")


class Outcome(NamedTuple):
    """What two steps computed."""

    losses: list[Tensor]
    weights: dict[str, Tensor]


def put_in(net: Net, events: list[Event]) -> Handles:
    """Put in one hook of every kind that changes nothing and notes that it ran."""
    names = {id(module): name or "net" for name, module in net.named_modules()}

    def note(kind: str, module: Any, *rest: Any) -> None:
        name = names.get(id(module), type(module).__name__)
        events.append((kind, name, *(word for word in rest if isinstance(word, str))))

    def on(kind: str) -> Callable[..., None]:
        return partial(note, kind)

    handles = [
        nn_module.register_module_forward_pre_hook(on("global forward pre")),
        nn_module.register_module_forward_hook(on("global forward")),
        nn_module.register_module_forward_hook(on("global forward, always"), with_kwargs=True, always_call=True),
        nn_module.register_module_full_backward_pre_hook(on("global backward pre")),
        nn_module.register_module_full_backward_hook(on("global backward")),
        nn_module.register_module_module_registration_hook(on("module registered")),
        nn_module.register_module_parameter_registration_hook(on("parameter registered")),
        nn_module.register_module_buffer_registration_hook(on("buffer registered")),
        register_optimizer_step_pre_hook(on("global optimizer pre")),
        register_optimizer_step_post_hook(on("global optimizer post")),
    ]
    for module in (net, net.first, net.act, net.second):
        handles += [
            module.register_forward_pre_hook(on("forward pre")),
            module.register_forward_pre_hook(on("forward pre, first"), with_kwargs=True, prepend=True),
            module.register_forward_hook(on("forward")),
            module.register_forward_hook(on("forward, always"), with_kwargs=True, always_call=True),
            module.register_full_backward_pre_hook(on("backward pre")),
            module.register_full_backward_hook(on("backward")),
        ]
    for name, parameter in net.named_parameters():
        handles.append(parameter.register_hook(lambda _, name=name: events.append(("tensor", name))))
        handles.append(
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(("accumulated", name)))
        )
    return handles


def change(net: Net, events: list[Event]) -> Handles:
    """Put in hooks of every kind that change what passes through them."""

    def of(module: nn.Module, result: Callable[..., Any]) -> Callable[..., Any]:
        return lambda seen, *rest: result(*rest) if seen is module else None

    def replaced(_: nn.Module, name: str, tensor: Tensor) -> Any:
        events.append(("replaced", name))
        return type(tensor)(tensor.detach() + 0.5)

    def another(*_: Any) -> Any:
        return nn.Tanh()

    def more(_: nn.Module, grads: Any) -> Any:
        return (grads[0] + 0.1,)

    def half(_: nn.Module, grads: Any, __: Any) -> Any:
        return (grads[0] * 0.5,)

    return [
        nn_module.register_module_forward_pre_hook(of(net.first, lambda args: (args[0] * 1.5,))),
        nn_module.register_module_forward_hook(of(net.act, lambda _, output: output + 0.25)),
        nn_module.register_module_full_backward_pre_hook(of(net.second, lambda grads: (grads[0] * 0.75,))),
        nn_module.register_module_full_backward_hook(of(net.second, lambda grads, _: (grads[0] * 3,))),
        nn_module.register_module_module_registration_hook(another),
        nn_module.register_module_parameter_registration_hook(replaced),
        nn_module.register_module_buffer_registration_hook(replaced),
        net.register_forward_pre_hook(lambda _, args, kwargs: (args, {**kwargs, "gain": 2.0}), with_kwargs=True),
        net.first.register_forward_pre_hook(lambda _, args: (args[0] - 1,)),
        net.second.register_forward_hook(lambda *seen: seen[-1] * 2),
        net.second.register_full_backward_pre_hook(more),
        net.act.register_full_backward_hook(half),
        net.first.weight.register_hook(lambda grad: grad * 2),
    ]


def train(net: Net, events: list[Event]) -> Outcome:
    """Take two steps; in the second the net grows."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(2):
        events.append(("step", str(step)))
        output = net(torch.randn(3, 4, generator=generator))
        output.register_hook(lambda _: events.append(("tensor", "output")))
        if step == 1:
            net.extra = nn.Tanh()
            net.scale = nn.Parameter(torch.full((2,), 0.5))
            net.register_buffer("offset", torch.ones(2))
        loss = output.square().mean()
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    events.append(("extra", type(net.extra).__name__))
    return Outcome(losses, net.state_dict())


@contextmanager
def removing(handles: Handles) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
            nn_module._global_forward_hooks_with_kwargs.pop(handle.id, None)


def outcome_of(install: Callable[[Net, list[Event]], Handles], when: str, detail: str) -> tuple[list[Event], Outcome]:
    """Run the program with the user's hooks put in `never`, `before` or `after` the one line of ours."""
    torch.manual_seed(0)
    net, events = Net(), list[Event]()
    if when == "never":
        with removing(install(net, events)):
            return events, train(net, events)
    if when == "before":
        with removing(install(net, events)), recorded(detail) as run:
            outcome = train(net, events)
    else:
        with recorded(detail) as run, removing(install(net, events)):
            outcome = train(net, events)
    assert len(run.steps) == 2
    assert len(run.steps[0].find_all("forward second")) == (detail == "all")
    return events, outcome


@pytest.mark.parametrize("detail", DETAILS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_every_kind_fire_in_pytorchs_order(when: str, detail: str) -> None:
    """The list of what fired is that of the same program without us, event for event."""
    plain, _ = outcome_of(put_in, "never", detail)
    watched, _ = outcome_of(put_in, when, detail)
    kinds = {kind for kind, *_ in plain} - {"step", "extra"}
    assert len(kinds) == 18, "a kind of hook never fired"
    assert watched == plain


@pytest.mark.parametrize("detail", DETAILS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_may_change_inputs_outputs_gradients_and_what_is_registered(when: str, detail: str) -> None:
    """Losses and weights are those that the hooks lead to without us, and not those without the hooks."""
    untouched, without = outcome_of(lambda *_: [], "never", detail)
    plain, changed = outcome_of(change, "never", detail)
    watched, outcome = outcome_of(change, when, detail)
    assert watched == plain != untouched
    assert outcome.losses == changed.losses != without.losses
    assert outcome.weights.keys() == changed.weights.keys()
    assert all(torch.equal(outcome.weights[name], value) for name, value in changed.weights.items())
    assert not torch.equal(outcome.weights["first.weight"], without.weights["first.weight"])


@pytest.mark.program
def test_the_deprecated_backward_hook_fires_too(tmp_path: Path) -> None:
    """`register_module_backward_hook`, which PyTorch allows only where no full hook ever was, sees what it saw."""
    program = str(PROGRAMS / "deprecated_hook_program.py")
    runs = [commands.forked_python(program, when, cwd=tmp_path) for when in ("never", "before", "after")]
    assert [(run.returncode, run.stderr) for run in runs] == [(0, "")] * 3
    plain, *watched = [run.stdout for run in runs]
    assert plain.count("Sigmoid") == plain.count("loss") == 3
    assert watched == [plain, plain]


# ---- what is left


def global_hooks() -> dict[str, list[tuple[int, Any]]]:
    """Give torch's dictionaries of global hooks, in the order that the hooks run."""
    owners = {"module": vars(nn_module), "optimizer": vars(torch_optimizer)}
    return {
        f"{owner}.{name}": list(value.items())
        for owner, names in owners.items()
        for name, value in names.items()
        if name.startswith("_global") and isinstance(value, dict)
    }


@pytest.mark.parametrize("detail", DETAILS)
def test_shutdown_leaves_only_the_users_hooks(detail: str) -> None:
    """Every dictionary of global hooks, and every module's own, is as it was, in the same order."""
    net, events = Net(), list[Event]()
    before = global_hooks()
    with removing(put_in(net, events)):
        with_users = global_hooks()
        own = {name: list(module._forward_hooks.values()) for name, module in net.named_modules()}
        with recorded(detail):
            train(net, events)
        assert global_hooks() == with_users
        assert own == {
            name: list(module._forward_hooks.values()) for name, module in net.named_modules() if name != "extra"
        }
    assert global_hooks() == before
    assert len(with_users) >= 10


# ---- hooks that raise


class OfTheUsersError(Exception):
    """What a hook raises."""


def raising(*_: Any) -> None:
    raise OfTheUsersError("no")


RAISING: dict[str, Callable[[Net], RemovableHandle]] = {
    "global pre": lambda _: nn_module.register_module_forward_pre_hook(raising),
    "global forward": lambda _: nn_module.register_module_forward_hook(raising),
    "global backward": lambda _: nn_module.register_module_full_backward_hook(raising),
    "root pre": lambda net: net.register_forward_pre_hook(raising),
    "root forward": lambda net: net.register_forward_hook(raising),
    "root backward": lambda net: net.register_full_backward_hook(raising),
    "layer pre": lambda net: net.second.register_forward_pre_hook(raising),
    "layer forward": lambda net: net.second.register_forward_hook(raising),
    "layer backward": lambda net: net.second.register_full_backward_hook(raising),
    "tensor": lambda net: net.first.weight.register_hook(raising),
}


def one_step(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("detail", DETAILS)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", RAISING)
def test_a_hook_that_raises_raises_as_ever_and_the_next_step_is_whole(kind: str, when: str, detail: str) -> None:
    """The user's own exception arrives; once the hook is out, a step looks as though nothing had been."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with recorded(detail) as good:
        one_step(net, optimizer)
    handle = RAISING[kind](net) if when == "before" else None
    with recorded(detail) as run:
        if handle is None:
            one_step(net, optimizer)
            handle = RAISING[kind](net)
        with removing([handle]):
            for _ in range(2):
                with pytest.raises(OfTheUsersError, match="no"):
                    one_step(net, optimizer)
        one_step(net, optimizer)
        one_step(net, optimizer)
    assert run.steps[-1].tree() == good.steps[0].tree()
    assert not [span.name for span in run.steps[-1].walk() if span.failed]
    assert not list(net._forward_hooks)
