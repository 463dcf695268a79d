"""A net that changes while it trains: what comes to it is named right at its next call, and the step says so."""

from collections.abc import Callable

import pytest
import torch
from support.recorded_training import Seen, plain, recorded
from torch import Tensor, nn

DETAILS = ["all", "off"]


def registered(step: Seen) -> list[tuple[str, str]]:
    """Give the path and the kind of what was registered in a step, in order, and check that it was then."""
    found = []
    for event in step.span.events:
        assert event.name == "torch.module.registered"
        assert step.start_ns <= event.time_unix_nano <= step.end_ns
        attributes = {entry.key: plain(entry.value) for entry in event.attributes}
        assert attributes.keys() == {"torch.module.path", "torch.registered"}
        found.append((attributes["torch.module.path"], attributes["torch.registered"]))
    return found


def called(step: Seen, direction: str = "forward") -> list[str]:
    """Give the paths of the modules below the root, in the order of their calls."""
    spans = [span for span in step.walk() if span.attributes.get("torch.direction") == direction]
    return [span.attributes["torch.module.path"] for span in spans[1:]]


def told(step: Seen, attribute: str) -> list[object]:
    """Give one attribute of the calls that the root made."""
    return [call.attributes[attribute] for call in step.find("forward Sequential").children]


class Net(nn.Module):
    """A body and a head, and whatever comes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        for name, module in self.named_children():
            if name.startswith("adapter"):
                x = x + module(x)
        output: Tensor = self.head(x)
        return output


class LowRank(nn.Module):
    """Put over a linear layer, as in LoRA."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 1, bias=False)
        self.up = nn.Linear(1, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x) + self.up(self.down(x))
        return output


def train(net: nn.Module, change: Callable[[], object], detail: str | int = "all", steps: int = 3) -> list[Seen]:
    """Take steps, and change the net in the second, after its forward; give the steps as they arrived."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with recorded(detail) as run:
        for step in range(steps):
            loss = net(torch.randn(3, 4)).square().mean()
            if step == 1:
                change()
            loss.backward()
            optimizer.step()
    return run.steps


@pytest.mark.parametrize("detail", DETAILS)
def test_an_adapter_is_added(detail: str) -> None:
    """One event names the adapter, none its own layers, and they have their paths from the next step on."""
    net = Net()
    steps = train(net, lambda: net.add_module("adapter", nn.Sequential(nn.Linear(4, 4), nn.Tanh())), detail)
    assert [registered(step) for step in steps] == [[], [("adapter", "module")], []]
    if detail == "all":
        before, after = ["body", "body.0", "body.1", "head"], ["adapter", "adapter.0", "adapter.1"]
        assert [called(step) for step in steps] == [before, before, [*before[:3], *after, "head"]]
        assert called(steps[2], "backward") == ["head", "adapter", "adapter.1", "adapter.0", "body", "body.1", "body.0"]
        assert steps[2].find("forward adapter.0").attributes["torch.model"] == "Net"


@pytest.mark.parametrize("detail", DETAILS)
def test_a_head_is_replaced(detail: str) -> None:
    """The new head has the old one's path, with its own shapes and parameters."""
    net = Net()
    steps = train(net, lambda: setattr(net, "head", nn.Linear(4, 7)), detail)
    assert [registered(step) for step in steps] == [[], [("head", "module")], []]
    if detail == "all":
        heads = [step.find("forward head").attributes for step in steps]
        assert [head["torch.output.shapes"] for head in heads] == [["3x2"], ["3x2"], ["3x7"]]
        assert [head["torch.module.parameters"] for head in heads] == [10, 10, 35]


def test_a_layer_is_wrapped() -> None:
    """What stood under a path moves below it: `head` is the wrapper's, `head.base` the old layer's."""
    net = Net()
    steps = train(net, lambda: setattr(net, "head", LowRank(net.head)))
    assert [registered(step) for step in steps] == [[], [("head", "module")], []]
    assert called(steps[2])[3:] == ["head", "head.base", "head.down", "head.up"]
    assert steps[2].find("forward head").attributes["torch.module.type"] == "LowRank"
    assert steps[2].find("forward head.base").attributes["torch.module.type"] == "Linear"


def test_layers_are_renumbered() -> None:
    """`del seq[0]` moves every layer behind it down by one, though PyTorch tells nobody."""
    net = nn.Sequential(nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    kinds = [["ReLU", "Linear", "Tanh", "Linear"]] * 2 + [["Linear", "Tanh", "Linear"]]
    steps = train(net, lambda: net.__delitem__(0))
    assert [called(step) for step in steps] == [["0", "1", "2", "3"], ["0", "1", "2", "3"], ["0", "1", "2"]]
    found = [told(step, "torch.module.type") for step in steps]
    assert found == kinds


def test_layers_trade_places() -> None:
    """Two layers that change places without a word to PyTorch change names."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))

    def swap() -> None:
        net._modules["0"], net._modules["1"] = net[1], net[0]

    steps = train(net, swap)
    counts = [told(step, "torch.module.parameters") for step in steps]
    assert [called(step) for step in steps] == [["0", "1"]] * 3
    assert counts == [[20, 16], [20, 16], [16, 20]]


def test_a_layer_is_made_in_forward() -> None:
    """A module that its owner makes at its first call has its path in that very call."""

    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "inner"):
                self.inner = nn.Sequential(nn.Linear(4, 2))
            output: Tensor = self.inner(x)
            return output

    net = nn.Sequential(Late(), nn.Linear(2, 2))
    steps = train(net, lambda: None, steps=2)
    assert [called(step) for step in steps] == [["0", "0.inner", "0.inner.0", "1"]] * 2
    assert [registered(step) for step in steps] == [[("0.inner", "module")], []]


def test_a_lazy_layer_takes_shape() -> None:
    """`LazyLinear` becomes a `Linear` in its first call, and counts the parameters that it has then."""
    net = nn.Sequential(nn.LazyLinear(6), nn.Linear(6, 2))
    with recorded() as run:
        for _ in range(2):
            net(torch.randn(3, 4)).sum().backward()
    (lazy, made) = (step.find("forward 0").attributes for step in run.steps)
    assert lazy["torch.module.type"] == made["torch.module.type"] == "Linear"
    assert lazy["torch.module.parameters"] == made["torch.module.parameters"] == 30


@pytest.mark.parametrize("detail", DETAILS)
def test_parameters_and_buffers_are_registered(detail: str) -> None:
    """New names and replaced parameters are told, buffers that are only set again are not."""
    net = Net()

    def change() -> None:
        net.head.bias = nn.Parameter(torch.ones(2))
        net.register_parameter("scale", nn.Parameter(torch.ones(1)))
        net.register_parameter("nothing", None)
        net.body.register_buffer("mean", torch.zeros(4))
        net.body.mean = torch.ones(4)
        net.extra = nn.Parameter(torch.ones(1))

    steps = train(net, change, detail)
    assert registered(steps[1]) == [
        ("head.bias", "parameter"),
        ("scale", "parameter"),
        ("body.mean", "buffer"),
        ("extra", "parameter"),
    ]
    assert [registered(steps[0]), registered(steps[2])] == [[], []]


def test_a_buffer_set_in_every_forward_does_not_flood() -> None:
    """A running mean that forward assigns anew is no registration."""

    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.layer(x)
            self.mean = self.get_buffer("mean") * 0.9 + output.detach().mean(0) * 0.1
            return output

    steps = train(Running(), lambda: None)
    assert [registered(step) for step in steps] == [[], [], []]


def test_what_a_net_is_built_of_is_no_event() -> None:
    """A second net that is built in a step, and a module that nobody holds, are not part of the first."""
    kept = []
    steps = train(Net(), lambda: kept.append(Net()))
    assert [registered(step) for step in steps] == [[], [], []]


def test_a_module_named_module_is_no_wrapper() -> None:
    """What comes to a child that is called `module` has that in its path."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Sequential(nn.Linear(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.module(x)
            return output

    net = Holder()
    steps = train(net, lambda: net.module.append(nn.Tanh()))
    assert registered(steps[1]) == [("module.1", "module")]
    assert called(steps[2]) == ["module", "module.0", "module.1"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="DataParallel would want the net on the GPU")
def test_what_comes_to_a_wrapped_net_has_the_nets_path() -> None:
    """`DataParallel` adds no `module.` to the path of a registration either."""
    net = Net()
    steps = train(nn.DataParallel(net), lambda: net.add_module("adapter", nn.Linear(4, 4)))
    assert registered(steps[1]) == [("adapter", "module")]
    assert "adapter" in called(steps[2])


def test_registrations_are_counted_once_a_step_and_bounded() -> None:
    """A program that registers without end cannot make a step without end."""
    net = Net()

    def change() -> None:
        for number in range(500):
            net.register_buffer(f"b{number}", torch.zeros(1))

    steps = train(net, change)
    assert registered(steps[1]) == [(f"b{number}", "buffer") for number in range(128)]
