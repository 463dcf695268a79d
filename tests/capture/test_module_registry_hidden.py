"""Modules that PyTorch does not know of, in a plain list or made in a forward: they stand below their caller."""

import torch
from support.named_net import Net, backward_of, captured, tree, trees
from support.recorded_training import recorded
from torch import Tensor, nn


def test_modules_that_no_module_holds_stand_below_their_caller() -> None:
    """A plain list hides modules from PyTorch; their class stands for the name, their own parts are named as ever."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.blocks = [nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU())), nn.Linear(4, 2)]

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    hidden = Hidden()
    with recorded() as run:
        for _ in range(2):
            backward_of(hidden)
            backward_of(nn.Sequential(hidden))
    block = ("Sequential", ["Sequential.0", ("Sequential.1", ["Sequential.1.0"])])
    below = ("0.Sequential", ["0.Sequential.0", ("0.Sequential.1", ["0.Sequential.1.0"])])
    assert trees(run)[0] == ("Hidden", ("Hidden", [block, "Linear"]))
    assert trees(run)[1] == ("Sequential", ("Sequential", [("0", [below, "0.Linear"])]))
    counts = [span.attributes["torch.module.parameters"] for span in run.steps[0].find_all("forward Sequential.0")]
    assert counts == [20]


def test_modules_made_in_forward_do_not_pile_up() -> None:
    """A loss or an activation that every call makes anew has its class for a name, and is forgotten with the call."""

    class Hasty(Net):
        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = nn.Softmax(dim=1)(super().forward(x))
            return output

    net = Hasty()
    with captured() as capture:
        kept = [net(torch.randn(3, 4)) for _ in range(50)]
        assert (len(capture.registry.states), len(capture.registry._hidden)) == (5, 0)
    with recorded() as run:
        kept = [net(torch.randn(3, 4)) for _ in range(3)]
    shown = ("Hasty", [("body", ["body.0", "body.1"]), "head", "Softmax"])
    assert [tree(call) for root in run.evaluations for call in root.children] == [shown] * len(kept)


def test_a_part_of_a_given_model_keeps_its_place_with_hidden_modules() -> None:
    """What a part's forward makes anew stands below the part, and the part where it stood."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = nn.Softmax(dim=1)(self.layer(x))
            return output

    outer = nn.ModuleList([Part()])
    with recorded(model=outer) as run:
        for _ in range(2):
            backward_of(outer[0])
    assert trees(run) == [("ModuleList", ("0", ["0.layer", "0.Softmax"]))] * 2


def test_depth_counts_from_the_root_for_hidden_modules_too() -> None:
    """`max_depth=0` shows the root alone."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = [nn.Linear(4, 2)]

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.blocks[0](x)
            return output

    with recorded(max_depth=0) as run:
        backward_of(Hidden())
        backward_of(nn.DataParallel(Net()))
    assert trees(run) == [("Hidden", "Hidden"), ("Net", ("Net", ["Net"]))]
