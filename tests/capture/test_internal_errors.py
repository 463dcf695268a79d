"""What fails in the hooks never reaches the user's program."""

import logging
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from support.otlp_http_receiver import receiver
from support.recorded_training import Seen, roots
from support.single_step_training import Model, step_tree
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

import torchotel
from torchotel._limits import MAX_FAULTS
from torchotel._records import Error
from torchotel.capture.thread_state import ThreadState
from torchotel.testing import capture
from torchotel.worker.stats import Stats

Detail = Literal["all", "off"]
ROWS = torch.arange(8.0).reshape(2, 4) / 8


class Secretive(nn.Linear):
    """Does not say whether it trains, which the hooks want to know."""

    @property
    def training(self) -> bool:
        raise LookupError("not telling")

    @training.setter
    def training(self, _: bool) -> None:
        pass


class Uncounted(nn.Parameter):
    """Does not say how many elements it has, which the model's description wants to know."""

    def numel(self) -> int:
        raise LookupError("not telling")


def uncounted() -> Model:
    model = Model(lambda m, x: m.a(x))
    model.get_submodule("a").bias = Uncounted(torch.zeros(4))
    return model


def secretive() -> Model:
    return Model(lambda m, x: m.b(m.shy(m.a(x))), shy=Secretive(4, 4))


def learnt(model: nn.Module, steps: int) -> list[Tensor]:
    """Train with an optimizer that asks the layers, not the model."""
    parameters = [parameter for layer in model.children() for parameter in layer.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1)
    for _ in range(steps):
        model(ROWS).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(parameters)


def instrumented(model: nn.Module, detail: Detail, steps: int) -> tuple[list[Tensor], Stats, list[Seen]]:
    with receiver() as server:
        with torchotel.instrument(endpoint=server.url.removesuffix("/v1/traces"), detail=detail) as handle:
            got = learnt(model, steps)
        return got, handle.stats(), [root for root in roots(server.spans) if root.name == "torch.step"]


def test_error_of_ours_loses_one_call(caplog: pytest.LogCaptureFixture) -> None:
    """A call that can't be recorded is missing, all else is there, the numbers are right, and it is logged once."""
    torch.manual_seed(1)
    expected = learnt(secretive(), 3)
    torch.manual_seed(1)
    with caplog.at_level(logging.ERROR, "torchotel"):
        got, stats, steps = instrumented(secretive(), "all", 3)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert stats["internal_errors"] == 3
    forward, backward = ["forward a", "forward b"], ["backward b", "backward a"]
    expected_tree = step_tree([("forward Model", forward)], [("backward Model", backward)])
    assert [step.tree() for step in steps] == [expected_tree] * 3
    (record,) = caplog.records
    assert "LookupError: not telling" in record.getMessage()


@pytest.mark.parametrize(("model", "detail"), [(secretive, "all"), (uncounted, "off")])
def test_errors_of_ours_switch_it_off(model: Callable[[], Model], detail: Detail) -> None:
    """After ten internal errors the hooks are out, and training goes on as if they had never been in."""
    torch.manual_seed(1)
    expected = learnt(model(), 12)
    torch.manual_seed(1)
    with receiver() as server:
        handle = torchotel.instrument(endpoint=server.url.removesuffix("/v1/traces"), detail=detail)
        got = learnt(model(), 12)
        assert not nn_module._global_forward_hooks
        assert not nn_module._global_forward_pre_hooks
        handle.shutdown()
    assert handle.stats()["internal_errors"] == 10
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_capture_switches_itself_off_where_only_forwards_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server has no later event than the end of a forward, and errors there count as any others do."""
    model = nn.Sequential(nn.Linear(4, 4))
    with capture(detail="off") as captured, torch.no_grad():
        session = captured.handle.session
        assert session is not None
        recorder = session._capture

        def leave(thread: ThreadState, now_ns: int, error: Error | None) -> None:
            thread.root.end()
            recorder.hooks.arm()
            raise LookupError("not telling")

        monkeypatch.setattr(recorder.root_calls, "leave", leave)
        for _ in range(MAX_FAULTS + 2):
            model(ROWS)
        assert recorder.guard.faults == MAX_FAULTS
        assert not recorder.switch.open
