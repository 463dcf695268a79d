"""Between detailed steps the module hooks are out."""

import sys
import threading
from collections.abc import Callable
from time import time_ns
from types import FrameType
from typing import Any

import pytest
import torch
from support.recorded_training import recorded
from support.single_step_training import PHASES_ONLY, Model, step_tree, train
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.utils.data import DataLoader, TensorDataset

from torchotel.capture import hook_manager
from torchotel.capture.recorder import Capture
from torchotel.sampling.detail import Detail

ROWS = torch.arange(8.0).reshape(2, 4) / 8
FORWARD = ("forward Model", ["forward a", "forward b"])
BACKWARD = ("backward Model", ["backward b", "backward a"])


def hooks_in() -> tuple[int, int]:
    """Count the global forward pre-hooks and forward hooks."""
    return len(nn_module._global_forward_pre_hooks), len(nn_module._global_forward_hooks)


def test_every_fifth_step_is_detailed() -> None:
    """With detail=5 the steps 0, 5 and 10 have their module spans, all others their phases."""
    with recorded(5) as run:
        train(Model(lambda m, x: m.b(m.a(x))), ROWS, steps=12)
    detailed = step_tree([FORWARD], [BACKWARD])
    assert [step.tree() for step in run.steps] == [PHASES_ONLY if n % 5 else detailed for n in range(12)]
    kept = [step.attributes.get("torch.kept.reason") for step in run.steps]
    assert kept == [None if n % 5 else "sampled" for n in range(12)]


def test_every_fifth_step_of_a_loader_is_detailed() -> None:
    """The same with a DataLoader, whose fetch opens the step."""
    model = Model(lambda m, x: m.b(m.a(x)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded(5) as run:
        for (batch,) in DataLoader(TensorDataset(ROWS.repeat(6, 1))):
            model(batch).sum().backward()
            optimizer.step()
    forwards = [len(step.find_all("forward Model")) for step in run.steps]
    assert forwards == [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0]


def test_hooks_are_out_between_detailed_steps() -> None:
    """Inside a step without detail there is no global forward hook, and no pre-hook once the forward has begun."""
    seen: list[tuple[int, int]] = []

    def watching(model: Any, x: Tensor) -> Any:
        seen.append(hooks_in())
        return model.b(model.a(x))

    with recorded(5):
        train(Model(watching), ROWS, steps=12)
    assert seen == [(0, 0) if n % 5 else (1, 1) for n in range(12)]


@pytest.mark.parametrize("detail", ["off", 100])
def test_one_hook_waits(detail: str | int) -> None:
    """Wherever the program stands after its first step, at most the one pre-hook that waits for a forward is in."""
    model = Model(lambda m, x: m.b(m.a(x)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = set()
    with recorded(detail):
        train(model, ROWS, steps=2)
        for (batch,) in DataLoader(TensorDataset(ROWS)):
            seen.add(hooks_in())
            loss = model(batch).sum()
            seen.add(hooks_in())
            loss.backward()
            seen.add(hooks_in())
            optimizer.step()
            seen.add(hooks_in())
            assert not any(module._forward_hooks for module in model.modules())
    assert seen == {(1, 0)}


def test_hooks_stay_while_all_is_detailed() -> None:
    """With detail="all" both hooks are in and no module has one of its own."""
    seen: list[tuple[int, int]] = []

    def watching(model: Any, x: Tensor) -> Any:
        assert not any(module._forward_hooks for module in model.modules())
        seen.append(hooks_in())
        return model.a(x)

    with recorded():
        train(Model(watching), ROWS, steps=2)
    assert seen == [(1, 1)] * 2


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2).eval()


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()


@pytest.mark.parametrize("detail", ["all", "off", 2])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("make", [encoder_layer, encoder])
def test_fused_path_of_the_transformer(
    make: Callable[[], nn.Module], detail: str | int, *, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder's fused kernel, which looks for hooks on modules, is used as without, and gives the same bits."""
    fused: list[bool] = []
    kernel = torch._transformer_encoder_layer_fwd

    def counted(*args: Any) -> Any:
        fused.append(args[0].is_nested)
        return kernel(*args)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
    model, x = make(), torch.randn(2, 3, 8)
    keywords = {"src_key_padding_mask": torch.tensor([[False, False, True], [False] * 3])} if padded else {}

    def outputs() -> list[Tensor]:
        fused.clear()
        with torch.no_grad():
            return [model(x, **keywords) for _ in range(3)]

    expected, kinds = outputs(), list(fused)
    with recorded(detail) as run:
        got = outputs()
    assert fused == kinds != []
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert len(run.evaluations) == 3


@pytest.mark.parametrize("detail", ["all", "off"])
def test_a_module_that_calls_itself(detail: Any) -> None:
    """An outermost call lasts to its own end, not to that of a call of the same module inside it."""

    class Halving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.after = nn.Identity()

        def forward(self, x: Tensor) -> Any:
            return self.after(self(x[: len(x) // 2])) if len(x) > 1 else x

    net = Halving()
    with recorded(detail) as run, torch.no_grad():
        for _ in range(2):
            net(torch.ones(8))
    assert len(run.evaluations) == 2
    assert not net._forward_hooks


@pytest.mark.parametrize(("seam", "missing"), [("ENDS_ARE_SEEN", False), ("hooks_of", lambda _: None)])
def test_without_a_place_to_put_hooks(seam: str, missing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it can't be told where torch keeps its hooks, steps are the same, and no hook stays behind."""
    monkeypatch.setattr(hook_manager, seam, missing)
    model = Model(lambda m, x: m.b(m.a(x)))
    before = hooks_in()
    with recorded(3) as run:
        train(model, ROWS, steps=6)
    detailed = step_tree([FORWARD], [BACKWARD])
    assert [step.tree() for step in run.steps] == [PHASES_ONLY if n % 3 else detailed for n in range(6)]
    assert hooks_in() == before
    assert not model._forward_hooks


@pytest.mark.parametrize("detail", ["all", "off"])
def test_two_threads_call_one_module(detail: Any) -> None:
    """An outermost call lasts to its own end where another thread's call of the same module ends before."""
    begun, ended, alone = threading.Barrier(2, timeout=60), threading.Event(), threading.Lock()
    late_ns = []

    def together(model: Any, x: Tensor) -> Any:
        begun.wait()
        if len(x) == 1:
            assert ended.wait(60)
            late_ns.append(time_ns())
        return model.b(model.a(x))

    model = Model(together)

    def call(rows: Tensor) -> None:
        with torch.no_grad():
            with alone:  # from its first forward on a thread misses none for another's
                model.a(rows)
            begun.wait()
            model(rows)
        ended.set()

    with recorded(detail) as run:
        threads = [threading.Thread(target=call, args=[rows]) for rows in (ROWS, ROWS[:1])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(evaluation.end_ns > late_ns[0] for evaluation in run.evaluations) == [False, False, False, True]
    assert not model._forward_hooks


def test_a_call_takes_one_of_our_hooks_along() -> None:
    """Whenever another thread's call begins while all hooks go in or out, it takes one pre-hook of ours along.

    Of two, each would take the call for an outermost one; with none it is not seen. So before each instruction of ours
    that runs meanwhile it is looked at what a call would take.
    """
    taken = []

    def at_each_instruction(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename != hook_manager.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            taken.append([hook for hook in nn_module._global_forward_pre_hooks.values() if hook in ours])
        return at_each_instruction

    capture, before = Capture(lambda _: None, Detail("off")), sys.gettrace()
    ours = capture.forward_hooks.before, capture.forward_hooks.on_root_forward_start
    capture.install()
    try:
        sys.settrace(at_each_instruction)
        for detailed in (True, False, True):
            capture.hooks.set_detailed(capture.current_thread.state, detailed=detailed)
    finally:
        sys.settrace(before)
        capture.uninstall()
        capture.end()
    assert all(len(along) == 1 for along in taken)
    assert all([hook] in taken for hook in ours)
