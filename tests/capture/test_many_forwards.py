"""Hundreds of forwards before one backward, without detail: only the first ones of an episode are observed."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchotel
from torchotel._limits import MAX_UNTRAINED_FORWARDS
from torchotel._records import StepRecord
from torchotel.capture.step_detector import EPISODE_FORWARDS
from torchotel.testing import Captured, capture

ROWS = torch.ones(2, 4)
EPISODE = 20  # forwards: more than are observed


class Net(nn.Module):
    """Calls itself on request, and raises on rows that are not four wide."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor, depth: int = 0) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(rows)
        return self(hidden, depth - 1) if depth else hidden


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[torch.Tensor]) -> None:
    torch.stack(losses).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not model._forward_hooks


def _train(model: nn.Module, *, steps: int = 2, forwards: int = 5) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        _train_once(model, optimizer, forwards)


def _train_once(model: nn.Module, optimizer: torch.optim.Optimizer, forwards: int) -> None:
    _step(model, optimizer, [model(ROWS).sum() for _ in range(forwards)])


def _phases(captured: Captured) -> list[list[str]]:
    own = {"torch.forward", "torch.backward", "torch.optimizer.step"}
    return [[span.name for span in step.children if span.name in own] for step in captured.steps]


WHOLE = ["torch.forward", "torch.backward", "torch.optimizer.step"]


def test_they_are_one_forward_phase_that_lasts_until_the_backward() -> None:
    """Also where the model calls itself: its own end is the outermost one."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with capture(detail="off") as captured:
        _train(model)
        _step(model, optimizer, [model(ROWS, depth).sum() for depth in (0, 2, 0, 1)])
    assert _phases(captured) == [WHOLE] * 3
    assert captured.evaluations == []
    for step in captured.steps:
        assert step.find("torch.forward").end_ns <= step.find("torch.backward").start_ns


def test_a_later_one_that_raises_is_the_error_of_the_step() -> None:
    """The loop catches it and goes on."""
    model = Net()
    with capture(detail="off") as captured:
        _train(model)
        losses = [model(ROWS).sum() for _ in range(3)]
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(2, 5))
        losses.append(model(ROWS).sum())
        _step(model, torch.optim.SGD(model.parameters(), lr=0.01), losses)
    assert [step.error is not None for step in captured.steps] == [False, False, True]
    assert _phases(captured) == [WHOLE] * 3


def test_an_interrupt_of_a_later_one_leaves_nothing() -> None:
    """Neither a hook on the model nor a forward that never ends."""

    class Interrupted(Net):
        def forward(self, rows: torch.Tensor, depth: int = 0) -> torch.Tensor:
            if depth:
                raise KeyboardInterrupt
            return super().forward(rows)

    model = Interrupted()
    with capture(detail="off") as captured:
        _train(model)
        with pytest.raises(KeyboardInterrupt):
            [model(ROWS, depth) for depth in (0, 0, 1)]
        _train(model)
    assert len(captured.steps) == 4
    assert not model._forward_hooks


def test_validation_amid_them_is_told_apart() -> None:
    """By the mode of the model, or by `no_grad`, each forward is an evaluation."""
    model = Net()
    with capture(detail="off") as captured:
        _train(model)
        model.eval()
        for _ in range(3):
            model(ROWS).sum().item()
        model.train()
        _train(model)
        for _ in range(3):
            with torch.no_grad():
                model(ROWS)
        _train(model)
    assert _phases(captured) == [WHOLE] * 6
    assert len(captured.evaluations) == 6


def test_a_request_after_them_has_an_evaluation_of_its_own() -> None:
    """Two requests forget `no_grad`, and nothing was ever trained; each forward of the other is an evaluation."""
    model, tracer = Net(), TracerProvider().get_tracer("requests")
    with capture(detail="off") as captured:
        for grad in (True, False, True):
            with tracer.start_as_current_span("request"), torch.set_grad_enabled(grad):
                for _ in range(3):
                    model(ROWS)
    assert len(captured.evaluations) == 5


def test_a_span_of_the_users_amid_them_is_part_of_the_step() -> None:
    """One around a forward, and one between two."""
    model, provider = Net(), TracerProvider()
    tracer, spans = provider.get_tracer("episode"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with capture(detail="off") as captured:
        _train(model)
        losses = [model(ROWS).sum() for _ in range(3)]
        with tracer.start_as_current_span("between") as span:
            spans.append(span.get_span_context())
        with tracer.start_as_current_span("around") as span:
            spans.append(span.get_span_context())
            losses += [model(ROWS).sum() for _ in range(3)]
        losses += [model(ROWS).sum() for _ in range(3)]
        _step(model, optimizer, losses)
    assert _phases(captured) == [WHOLE] * 3
    assert {span.trace_id for span in spans} == {captured.steps[-1].trace_id}


def test_forwards_of_other_threads_are_theirs() -> None:
    """They serve the same model meanwhile, each forward an evaluation."""
    model = Net()
    losses = []

    def serve() -> None:
        with torch.no_grad():
            model(ROWS)

    with capture(detail="off") as captured:
        _train(model)
        for _ in range(3):
            losses.append(model(ROWS).sum())
            thread = threading.Thread(target=serve)
            thread.start()
            thread.join()
        _step(model, torch.optim.SGD(model.parameters(), lr=0.01), losses)
        assert len(captured.steps) == 3
    assert _phases(captured) == [WHOLE] * 3
    assert len(captured.evaluations) == 3


def test_a_flush_amid_them_hands_over_only_what_has_ended() -> None:
    """And a pause ends what there is."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with capture(detail="off") as captured:
        _train(model)
        losses = [model(ROWS).sum() for _ in range(3)]
        assert len(captured.steps) == 2  # asking flushes
        losses += [model(ROWS).sum() for _ in range(3)]
        _step(model, optimizer, losses)
        losses = [model(ROWS).sum() for _ in range(3)]
        captured.handle.pause()
        losses += [model(ROWS).sum() for _ in range(3)]
        captured.handle.resume()
        _train(model)
    assert _phases(captured) == [WHOLE] * 5
    assert len(captured.evaluations) == 1


def test_detail_that_is_asked_for_amid_them_begins_with_the_next_step() -> None:
    """And ends with it."""
    model = Net()
    with capture(detail="off") as captured:
        _train(model)
        losses = [model(ROWS).sum() for _ in range(3)]
        captured.handle.detail(steps=1)
        losses += [model(ROWS).sum() for _ in range(3)]
        _step(model, torch.optim.SGD(model.parameters(), lr=0.01), losses)
        _train(model)
    assert [len(step.find_all("forward Net")) for step in captured.steps] == [0, 0, 0, 5, 0]


def test_hooks_of_an_evaluation_elsewhere_go_with_the_next_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A detailed evaluation on another thread puts hooks on every call; a further forward of the step removes them."""
    model, other = Net(), Net()
    with capture(detail="off") as captured:
        session = captured.handle.session
        assert session is not None
        recorder = session._capture
        _train(model)
        losses = [model(ROWS).sum() for _ in range(3)]
        monkeypatch.setattr(recorder.detail, "of_evaluation", lambda _: True)

        def evaluate() -> None:
            with torch.no_grad():
                other(ROWS)

        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()
        losses.append(model(ROWS).sum())
        assert not recorder.hooks.all_in
        torch.stack(losses).sum().backward()


class Watched(Net):
    """Counts its calls that a hook of torchotel observes."""

    def __init__(self) -> None:
        super().__init__()
        self.observed = 0

    def forward(self, rows: torch.Tensor, depth: int = 0) -> torch.Tensor:
        self.observed += len(self._forward_hooks)
        return super().forward(rows, depth)


def test_after_an_episode_only_the_first_forwards_of_the_next_one_are_observed() -> None:
    """The first episode is observed as a whole: only its backward shows that it is one."""
    model = Watched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    observed = []
    with capture(detail="off") as captured:
        for forwards in (EPISODE, EPISODE, EPISODE, 5, EPISODE):
            model.observed = 0
            _train_once(model, optimizer, forwards)
            observed.append(model.observed)
    assert observed == [EPISODE, EPISODE_FORWARDS, EPISODE_FORWARDS, 5, EPISODE]
    assert _phases(captured) == [WHOLE] * 5
    assert captured.evaluations == []


def test_a_validation_after_an_episode_is_told_apart() -> None:
    """The optimizer's step comes between them; a fetch would, too."""
    model = Net()
    with capture(detail="off") as captured:
        for _ in range(3):
            _train(model, forwards=EPISODE)
            with torch.no_grad():
                model(ROWS)
            for (batch,) in DataLoader(TensorDataset(ROWS)):
                with torch.no_grad():
                    model(batch)
    assert _phases(captured) == [WHOLE] * 6
    assert len(captured.evaluations) == 3 * 3


def test_a_critic_with_a_backward_of_its_own_leaves_the_actors_episode_one() -> None:
    """No forward lies between the two backwards."""
    actor, critic = Watched(), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (actor, critic)]
    observed = []
    with capture(detail="off") as captured:
        for _ in range(3):
            actor.observed = 0
            losses = [actor(ROWS).sum() for _ in range(EPISODE)]
            critic(ROWS).sum().backward()
            optimizers[1].step()
            torch.stack(losses).sum().backward()
            optimizers[0].step()
            observed.append(actor.observed)
    assert observed == [EPISODE, EPISODE_FORWARDS, EPISODE_FORWARDS]
    assert len(captured.steps) == 3


def test_an_explicit_step_after_unobserved_forwards_begins_with_its_own_first_forward() -> None:
    """Forwards of a rollout that is not trained on come before it."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with capture(detail="off") as captured:
        for _ in range(3):
            for _ in range(EPISODE):
                model(ROWS)
            with torchotel.step():
                _train_once(model, optimizer, EPISODE)
    assert _phases(captured) == [WHOLE] * 3
    assert len(captured.evaluations) == 3


def test_a_network_without_gradients_in_each_move_of_an_episode_is_observed() -> None:
    """As the target network of Q-learning is."""
    model, target = Net(), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with capture(detail="off") as captured:
        _train(model, forwards=EPISODE)
        losses = []
        for _ in range(EPISODE):
            losses.append(model(ROWS).sum())
            with torch.no_grad():
                target(ROWS)
        _step(model, optimizer, losses)
    assert _phases(captured) == [WHOLE] * 3
    assert captured.evaluations == []


def test_a_backward_inside_each_forward_of_an_episode_is_part_of_the_forward() -> None:
    """An unobserved forward could not tell."""

    class Penalised(Net):
        def forward(self, rows: torch.Tensor, depth: int = 0) -> torch.Tensor:
            rows = rows.clone().requires_grad_()
            out = super().forward(rows, depth)
            (gradient,) = torch.autograd.grad(out.sum(), rows, create_graph=True)
            return out + gradient

    model = Penalised()
    with capture(detail="off") as captured:
        _train(model, steps=3, forwards=EPISODE)
    assert len(captured.steps) == 3
    assert captured.evaluations == []


def test_norms_of_a_model_that_runs_late_in_an_episode_are_read() -> None:
    """All forwards are observed while norms are read on steps without detail."""
    actor, critic = Net(), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.01)
    with capture(detail="off", gradient_norms=True) as captured:
        for _ in range(3):
            losses = [actor(ROWS).sum() for _ in range(EPISODE)]
            _step(actor, optimizer, [*losses, critic(ROWS).sum()])
    steps = [record for record in captured.records if isinstance(record, StepRecord)]
    norms = [record.gradients for record in steps]
    assert [{owner.path for owner, _ in known.modules} for known in norms if known] == [{"layer", "Linear"}] * 3


def test_forwards_of_another_thread_amid_episodes_are_observed() -> None:
    """Its first one, between two events of the training thread, is."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def serve() -> None:
        with torch.no_grad():
            model(ROWS)

    with capture(detail="off") as captured:
        for _ in range(3):
            _train_once(model, optimizer, EPISODE)
            thread = threading.Thread(target=serve)
            thread.start()
            thread.join()
    assert _phases(captured) == [WHOLE] * 3
    assert len(captured.evaluations) == 3


@pytest.mark.parametrize(("detail", "spans"), [("auto", MAX_UNTRAINED_FORWARDS), ("all", MAX_UNTRAINED_FORWARDS + 9)])
def test_forwards_on_a_thread_that_runs_no_backward(detail: str, spans: int) -> None:
    """Their backwards run on another thread, so they stay one evaluation, whose detail ends."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with capture(detail=detail) as captured, ThreadPoolExecutor(1) as pool:
        for _ in range(MAX_UNTRAINED_FORWARDS + 9):
            _step(model, optimizer, [pool.submit(model, ROWS).result().sum()])
    (evaluation,) = captured.evaluations
    assert len(evaluation.find_all("forward Linear")) == spans
    assert len(captured.steps) == MAX_UNTRAINED_FORWARDS + 9


def test_the_first_episode_has_all_its_calls() -> None:
    model = nn.Linear(4, 1)
    with capture(detail="auto") as captured:
        _train(model, steps=2, forwards=MAX_UNTRAINED_FORWARDS + 9)
    assert [len(step.find_all("forward Linear")) for step in captured.steps] == [MAX_UNTRAINED_FORWARDS + 9] * 2
