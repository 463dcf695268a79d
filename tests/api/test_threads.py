"""Several threads and processes: each step is its own thread's, and children are let alone."""

import copy
import queue
import threading
from collections import Counter
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from support import PROGRAMS
from support.commands import python
from support.computing_dataset import Computed
from support.otlp_http_receiver import Pushed, Received, receiver
from support.recorded_training import Run, recorded, roots
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.utils.data import DataLoader

BATCH = torch.arange(8.0).reshape(2, 4) / 8
SCRIPT = PROGRAMS / "spawning_script.py"


class Inner(nn.Module):
    """A layer inside a model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


class First(Inner):
    """What the first thread trains."""


class Second(Inner):
    """What the second thread trains."""


def tree_of(model: type[nn.Module], *data: str, detailed: bool) -> Any:
    name = model.__name__
    forward, backward = (("torch." + way, [(f"{way} {name}", [f"{way} layer"])]) for way in ("forward", "backward"))
    phases = [forward, backward] if detailed else ["torch.forward", "torch.backward"]
    return ("torch.step", [*data, *phases, "torch.optimizer.step"])


def counted(run: Run) -> dict[str, int]:
    """Count the trees of all steps and evaluations."""
    return Counter(str(root.tree()) for root in run.roots if root.name != "torch.run")


def expected(*trees: tuple[Any, int]) -> dict[str, int]:
    return {str(tree): count for tree, count in trees}


def events_of(model: nn.Module, steps: int) -> list[Callable[[], object]]:
    """Give what a training loop does, one event after the other."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss: list[Tensor] = []

    def forward() -> None:
        loss.append(model(BATCH).sum())

    def backward() -> None:
        loss.pop().backward()

    return [forward, backward, optimizer.step] * steps


@pytest.mark.parametrize("detail", ["all", "off"])
def test_two_threads_in_turns(detail: str) -> None:
    """Two threads that train, one event of one after one event of the other: each step has its own thread's spans."""
    turns = [threading.Semaphore(1), threading.Semaphore(0)]

    def work(index: int, model: nn.Module) -> None:
        for event in events_of(model, steps=4):
            turns[index].acquire()
            event()
            turns[1 - index].release()

    models = [First(), Second()]
    with recorded(detail) as run:
        threads = [threading.Thread(target=work, args=pair) for pair in enumerate(models)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    detailed = detail == "all"
    trees = [str(tree_of(type(model), detailed=detailed)) for model in models]
    assert counted(run) == Counter(trees * 4)


def test_two_threads_at_once() -> None:
    """Two threads that train as fast as they can lose and mix nothing, and learn what they learn alone."""

    def work(model: nn.Module) -> None:
        for event in events_of(model, steps=50):
            event()

    models = (First(), Second())
    alone = copy.deepcopy(models)
    for copied in alone:
        work(copied)
    with recorded() as run:
        threads = [threading.Thread(target=work, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for one, other in zip(models, alone, strict=True):
        assert all(map(torch.equal, one.parameters(), other.parameters()))
    assert counted(run) == expected((tree_of(First, detailed=True), 50), (tree_of(Second, detailed=True), 50))
    assert sorted(step.attributes["torch.step.number"] for step in run.steps) == list(range(100))


@pytest.mark.parametrize("detail", ["all", "off"])
def test_prefetching_thread(detail: str) -> None:
    """A thread that only fetches makes no step, and its transforms no span; the training thread has its steps."""
    batches: queue.Queue[Tensor | None] = queue.Queue(1)

    def fetch() -> None:
        for batch in DataLoader(Computed(), batch_size=2):
            batches.put(batch)
        batches.put(None)

    model = First()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded(detail) as run:
        thread = threading.Thread(target=fetch)
        thread.start()
        while (batch := batches.get()) is not None:
            model(batch).sum().backward()
            optimizer.step()
        thread.join()
    assert counted(run) == expected((tree_of(First, detailed=detail == "all"), 4))


@pytest.mark.parametrize("detail", ["all", "off", 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_loader_with_modules(workers: int, detail: str | int) -> None:
    """A module inside a dataset makes no span, in this process or in a forked worker, and the data is what it was."""
    torch.manual_seed(1)
    data = Computed()
    plain = list(DataLoader(data, batch_size=2))
    model = First()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    got = []
    with recorded(detail) as run:
        for batch in DataLoader(data, batch_size=2, num_workers=workers):
            got.append(batch)
            model(batch).sum().backward()
            optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(got, plain, strict=True))
    detailed = {"all": [True] * 4, "off": [False] * 4, 2: [True, False] * 2}[detail]
    data_phases = [["torch.data"] * count for count in (2, 1, 1, 1)]  # the making of the iterator is one
    pairs = zip(data_phases, detailed, strict=True)
    assert [step.tree() for step in run.steps] == [tree_of(First, *phases, detailed=all_) for phases, all_ in pairs]
    assert run.evaluations == []


def what_is_in(pipe: Connection) -> None:
    """Tell, in a child, which hooks are in, which threads of ours run, and whether torch works."""
    model = First()
    model(BATCH).sum().backward()
    hooks = [*nn_module._global_forward_hooks, *nn_module._global_forward_pre_hooks]
    wrapped = "torchotel" in torch.autograd._engine_run_backward.__module__  # type: ignore[attr-defined]  # a private function
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("torchotel")]
    pipe.send((hooks, wrapped, threads, model.layer.weight.grad is not None))
    pipe.close()


@pytest.mark.program
@pytest.mark.parametrize("detail", ["all", "off"])
def test_fork_after_instrument(detail: str) -> None:
    """A forked child has no hook, no patch and no thread of ours, and trains; the parent's steps go on.

    In a process of its own: a child of one whose thread pools have run, as other tests' have, may wait for ever.
    """
    process = get_context("spawn").Process(target=fork_and_train, args=(detail,))
    process.start()
    process.join(120)
    assert process.exitcode == 0


def fork_and_train(detail: str) -> None:
    """Fork between two steps."""
    context = get_context("fork")
    ours, childs = context.Pipe()
    model = First()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded(detail) as run:
        for number in range(2):
            if number:
                child = context.Process(target=what_is_in, args=(childs,))
                child.start()
                assert ours.poll(30)
                assert ours.recv() == ([], False, [], True)
                child.join()
            model(BATCH).sum().backward()
            optimizer.step()
    assert counted(run) == expected((tree_of(First, detailed=detail == "all"), 2))


def processes_of(requests: list[Received]) -> dict[int, list[Any]]:
    """Give the step trees of each process."""
    found: dict[int, list[Any]] = {}
    for request in requests:
        for resource in request.message.resource_spans:
            (pid,) = (e.value.int_value for e in resource.resource.attributes if e.key == "process.pid")
            spans = [span for scope in resource.scope_spans for span in scope.spans]
            found.setdefault(pid, []).extend(root.tree() for root in roots(spans) if root.name != "torch.run")
    return found


def pushers(pushed: list[Pushed]) -> set[int]:
    """Give the processes that pushed metrics."""
    resources = [one.resource for push in pushed for one in push.message.resource_metrics]
    return {one.value.int_value for resource in resources for one in resource.attributes if one.key == "process.pid"}


@pytest.mark.program
@pytest.mark.parametrize(("what", "processes"), [("loader", 1), ("ranks", 2)])
def test_script_that_spawns(what: str, processes: int) -> None:
    """Spawned DataLoader workers, which run the one line again, send nothing; spawned training processes their own."""
    with receiver() as server:
        url = server.url.removesuffix("/v1/traces")
        tests = str(SCRIPT.parents[1])
        done = python(str(SCRIPT), url, what, cwd=SCRIPT.parent, OTEL_METRICS_EXPORTER="otlp", PYTHONPATH=tests)
        found = processes_of(server.requests)
    assert done.returncode == 0, done.stderr
    step = [("torch.forward", ["forward Linear"]), ("torch.backward", ["backward Linear"]), "torch.optimizer.step"]
    epoch = [("torch.step", ["torch.data", *first, *step]) for first in (["torch.data"], [])]
    assert list(found.values()) == [epoch * 2] * processes
    assert set(found) <= pushers(server.pushed)
    assert len(pushers(server.pushed)) == processes + (what == "ranks"), "they are spawned by one that trains nothing"
