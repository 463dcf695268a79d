"""Which name a module goes by: its path under the root that holds it."""

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from support.named_net import NET, Net, backward_of, captured, trees
from support.recorded_training import recorded
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel


def test_two_models_of_one_class_have_names_of_their_own() -> None:
    """Paths are the same, `torch.model` tells them apart, whichever is called first later."""
    one, other = Net(), Net()
    with recorded() as run:
        for net in (one, other, other, one):
            backward_of(net)
    assert trees(run) == [("Net", NET), ("Net-2", NET), ("Net-2", NET), ("Net", NET)]
    models = [{s.attributes["torch.model"] for s in root.walk() if "torch.model" in s.attributes} for root in run.steps]
    assert models == [{"Net"}, {"Net-2"}, {"Net-2"}, {"Net"}]


def test_a_dead_models_name_is_free_again() -> None:
    """A program that builds a model after the other never gets beyond the names it needs at once."""
    with recorded() as run:
        for _ in range(4):
            backward_of(Net())
            gc.collect()
    assert [model for model, _ in trees(run)] == ["Net"] * 4


def test_no_model_is_kept_alive() -> None:
    """What is remembered of modules goes with them."""
    with captured() as capture:
        for _ in range(3):
            backward_of(Net())
        gc.collect()
        assert capture.registry.states == {}
        assert capture.registry._owners == {}
        assert capture.registry._roots == {}


def test_a_shared_module_has_its_first_path() -> None:
    """A module that stands in two places is called by the first, and its calls are numbered."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Linear(4, 4)
            self.again = nn.Sequential(self.encode, nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.again(self.encode(x))
            return output

    with recorded() as run:
        backward_of(Tied())
    assert trees(run) == [("Tied", ("Tied", ["encode", ("again", ["encode", "again.1"])]))]
    assert [call.attributes["torch.call.index"] for call in run.steps[0].find_all("forward encode")] == [0, 1]


def test_a_part_that_two_models_share_keeps_the_name_of_the_first() -> None:
    """An actor and a critic with one encoder: it stays the actor's, whoever calls it."""

    class Actor(Net):
        pass

    class Critic(nn.Module):
        def __init__(self, encoder: nn.Module) -> None:
            super().__init__()
            self.vision = encoder
            self.value = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.value(self.vision(x))
            return output

    actor = Actor()
    critic = Critic(actor.body)
    with recorded() as run:
        for net in (actor, critic, actor):
            backward_of(net)
    body = ("body", ["body.0", "body.1"])
    acting = ("Actor", ("Actor", [body, "head"]))
    assert trees(run) == [acting, ("Critic", ("Critic", [body, "value"])), acting]


@pytest.mark.parametrize("known", [False, True])
def test_wrappers_leave_no_trace_in_paths(*, known: bool) -> None:
    """DataParallel, AveragedModel and checkpoint wrappers go by what they wrap, known before or not."""
    net = Net()
    net.body[0] = checkpoint_wrapper(net.body[0])
    with recorded() as run:
        if known:
            backward_of(net)
        backward_of(nn.DataParallel(net))
    inner = ("Net", [("body", [("body.0", ["body.0"]), "body.1"]), "head"])
    assert trees(run) == [("Net", inner)] * known + [("Net", ("Net", [inner]))]
    types = [span.attributes["torch.module.type"] for span in run.steps[-1].find_all("forward Net")]
    assert types == ["DataParallel", "Net"]


def test_an_averaged_copy_is_a_model_of_its_own() -> None:
    """AveragedModel holds a copy of the net: one more living root of its class."""
    net = Net()
    averaged = AveragedModel(net)
    with recorded() as run:
        backward_of(net)
        backward_of(averaged)
    assert trees(run) == [("Net", NET), ("Net-2", ("Net", [NET]))]


def test_a_root_that_is_never_called_gives_its_names() -> None:
    """A trainer's module calls its parts one by one; built after `instrument()`, they have their full paths."""

    class Trainer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Net()
            self.loss = nn.MSELoss()

        def training_step(self, x: Tensor) -> Tensor:
            loss: Tensor = self.loss(self.encoder(x), torch.zeros(3, 2))
            return loss

    with recorded() as run:
        trainer = Trainer()
        for _ in range(2):
            trainer.training_step(torch.randn(3, 4)).backward()
    encoder = ("encoder", [("encoder.body", ["encoder.body.0", "encoder.body.1"]), "encoder.head"])
    assert trees(run) == [("Trainer", encoder), ("Trainer", "loss")] * 2


def test_a_model_that_is_given_has_its_names_from_the_first_call() -> None:
    """`instrument(model)` names what was built before, though only a part of it is called."""
    outer = nn.ModuleDict({"left": Net(), "right": nn.Linear(4, 2)})
    with recorded(model=outer) as run:
        backward_of(outer["left"])
        backward_of(outer["right"])
    left = ("left", [("left.body", ["left.body.0", "left.body.1"]), "left.head"])
    assert trees(run) == [("ModuleDict", left), ("ModuleDict", "right")]


def test_a_root_that_was_a_part_is_named_anew() -> None:
    """A net that is called alone and then becomes part of another has the other's path from then on."""
    net = Net()
    with recorded() as run:
        backward_of(net)
        backward_of(nn.Sequential(net))
    below = ("0", [("0.body", ["0.body.0", "0.body.1"]), "0.head"])
    assert trees(run) == [("Net", NET), ("Sequential", ("Sequential", [below]))]


def test_equality_without_a_hash_does_no_harm() -> None:
    """A module class that defines `__eq__` alone cannot be a dictionary's key, and need not be."""

    class Equal(nn.Linear):
        __hash__ = None  # type: ignore[assignment] # as Python sets it

        def __eq__(self, other: object) -> bool:
            return True

    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Equal(4, 4), Equal(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.right(self.left(x))
            return output

    with recorded() as run:
        twins = Twins()
        twins(torch.randn(3, 4)).sum().backward()
    assert trees(run) == [("Twins", ("Twins", ["left", "right"]))]


def test_recursion_keeps_the_name() -> None:
    """A module that calls itself shows under its own name within itself."""

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            output: Tensor = self(self.layer(x), depth - 1) if depth else x
            return output

    with recorded() as run:
        backward_of(Again())
    assert trees(run) == [("Again", ("Again", ["layer", ("Again", ["layer", "Again"])]))]


@pytest.mark.parametrize("detail", ["all", "off"])
def test_modules_carry_nothing_of_ours(detail: str) -> None:
    """While and after it is watched a model pickles, copies and saves to the same as one that never was."""

    def inside(net: nn.Module) -> dict[str, Any]:
        return {name: {key: repr(value) for key, value in vars(m).items()} for name, m in net.named_modules()}

    torch.manual_seed(1)
    never = Net()
    backward_of(never)
    torch.manual_seed(1)
    net = Net()
    with recorded(detail):
        backward_of(net)
        copies = [pickle.loads(pickle.dumps(net)), copy.deepcopy(net)]  # noqa: S301  # our own bytes
        assert inside(net) == inside(never)
        backward_of(copies[0])
    for one in (net, *copies):
        assert inside(one) == inside(never)
        assert list(one.state_dict()) == list(never.state_dict())
        assert all(torch.equal(value, never.state_dict()[name]) for name, value in one.state_dict().items())


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_a_scripted_part_is_one_span() -> None:
    """TorchScript runs without hooks inside, keeps its modules its own way, and does not mind a net that grows."""
    net = Net()
    net.add_module("body", torch.jit.script(net.body))
    with recorded() as run:
        for _ in range(3):
            backward_of(net)
            net.add_module("extra", nn.ReLU())
    assert trees(run) == [("Net", ("Net", ["body", "head"]))] * 3
