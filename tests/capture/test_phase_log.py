"""The phases of the main thread while they run, which the companion reads if the process ends."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import perf_counter_ns

import pytest
import torch
from opentelemetry.instrumentation.utils import suppress_instrumentation
from support.failing_modules import FailsOnce
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from torchotel.capture.recorder import Capture
from torchotel.sampling.detail import Detail
from torchotel.tracing.context import current_span
from torchotel.worker.status_page import PAGE_BYTES, PageReader, PhaseWriter

ROWS = torch.ones(2, 4)


class Page:
    """The page that a training writes to."""

    def __init__(self) -> None:
        self.words = memoryview(bytearray(PAGE_BYTES)).cast("Q")

    @property
    def module(self) -> str:
        """Return the path of the innermost module call."""
        return PageReader(self.words).module

    def phases(self) -> list[str]:
        """Name the phases: `forward`; `(forward` if it is open; `evaluation` for a forward without gradients."""
        return [
            ("" if phase.end_ns else "(") + (phase.kind if phase.grad else "evaluation")
            for phase in PageReader(self.words).phases(perf_counter_ns())
        ]


@contextmanager
def capturing(detail: str = "off") -> Iterator[Page]:
    page = Page()
    writer = PhaseWriter(page.words, threading.get_ident())
    capture = Capture(lambda _: None, Detail(detail), user_span=current_span, phase_log=writer)
    capture.install()
    try:
        yield page
    finally:
        capture.uninstall()
        capture.end()


@pytest.mark.parametrize("detail", ["off", "all"])
def test_each_phase_is_on_the_page_while_it_runs(detail: str) -> None:
    seen: list[str] = []

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(page.phases()[-1])
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(lambda _: seen.append(page.phases()[-1]))
            return y

    class Rows(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> torch.Tensor:
            seen.append(page.phases()[-1])
            return ROWS

    with capturing(detail) as page:
        net = Net(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        optimizer.register_step_pre_hook(lambda *_: seen.append(page.phases()[-1]))
        for rows in DataLoader(Rows()):
            with torch.no_grad():
                net(rows)
            net(rows).sum().backward()
            optimizer.step()
        assert seen == ["(data", "(evaluation", "(forward", "(backward", "(optimizer"]
        # The loader's iterator is made, and found at its end.
        assert page.phases() == ["data", "data", "evaluation", "forward", "backward", "optimizer", "data"]


@pytest.mark.parametrize(("detail", "paths"), [("all", ["0", "0.0", "0", "1", "Sequential"]), ("off", [""] * 5)])
def test_the_innermost_module_call_is_on_the_page(detail: str, paths: list[str]) -> None:
    """On detailed steps. Calls that an interrupt leaves open end with the next call."""
    seen: list[str] = []
    with capturing(detail) as page:
        inner, last = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)
        net = nn.Sequential(inner, last)
        net(ROWS).sum().backward()  # the modules get their names with their first calls
        for module in (inner, inner[0], last):
            module.register_forward_pre_hook(lambda *_: seen.append(page.module))
        for module in (inner[0], last):
            module.register_forward_hook(lambda *_: seen.append(page.module))
        net(ROWS).sum().backward()
        assert seen == paths
        assert page.module == ""
        with suppress(KeyboardInterrupt):
            nn.Sequential(inner, FailsOnce(KeyboardInterrupt()))(ROWS)
        net(ROWS)
        assert page.module == ""


def test_phases_in_a_closure_are_inside_of_the_optimizer() -> None:
    with capturing() as page:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=1)
        seen: list[list[str]] = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = net(ROWS).square().sum()
            loss.backward()
            seen.append(page.phases())
            return loss

        optimizer.step(closure)
        assert seen[0] == ["(optimizer", "forward", "backward"]
        assert page.phases()[0] == "optimizer"


@pytest.mark.parametrize(
    ("detail", "phases"), [("off", ["forward", "backward"]), ("all", ["forward", "forward", "backward"])]
)
def test_what_an_interrupt_leaves_open_ends_with_the_next_phase(detail: str, phases: list[str]) -> None:
    """Without detail, an interrupted forward is noticed at the backward, as in the record of the step."""
    with capturing(detail) as page:
        net = nn.Sequential(nn.Linear(4, 4), FailsOnce(KeyboardInterrupt()))
        with suppress(KeyboardInterrupt):
            net(ROWS)
        net(ROWS).sum().backward()
        assert page.phases() == phases


def test_a_failed_step_of_an_optimizer_ends() -> None:
    with capturing() as page:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def fail(*_: object) -> None:
            raise ValueError

        optimizer.register_step_post_hook(fail)
        net(ROWS).sum().backward()
        with suppress(ValueError):
            optimizer.step()
        assert page.phases() == ["forward", "backward", "optimizer"]


def test_an_interrupted_backward_ends_with_the_next_phase() -> None:
    def interrupt(_: torch.Tensor) -> None:
        raise KeyboardInterrupt

    with capturing() as page:
        net = nn.Linear(4, 1)
        y = net(ROWS)
        y.register_hook(interrupt)
        with suppress(KeyboardInterrupt):
            y.sum().backward()
        net(ROWS)
        assert page.phases() == ["forward", "backward", "forward"]


def test_other_threads_are_not_on_the_page() -> None:
    with capturing() as page:
        other = threading.Thread(target=lambda: nn.Linear(4, 1)(ROWS).sum().backward())
        other.start()
        other.join()
        assert page.phases() == []


def test_phases_under_suppression_are_not_on_the_page() -> None:
    """A suppressed step is not recorded, so it is not exported if the process ends."""
    with capturing() as page:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with suppress_instrumentation():
            for (rows,) in DataLoader(TensorDataset(ROWS)):
                net(rows).sum().backward()
                optimizer.step()
        assert page.phases() == []
        net(ROWS)
        assert page.phases() == ["forward"]
