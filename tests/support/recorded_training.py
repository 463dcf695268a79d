"""What tests share: the MNIST net of PyTorch's basic example, a short training, and spans as a receiver saw them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import torchotel
from support.otlp_http_receiver import receiver
from torchotel._handle import Handle
from torchotel.testing import CapturedSpan


class Net(nn.Module):
    """The net of PyTorch's basic MNIST example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.conv1(x))
        x = functional.relu(self.conv2(x))
        x = functional.max_pool2d(x, 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = functional.relu(self.fc1(x))
        return functional.log_softmax(self.fc2(self.dropout2(x)), dim=1)


class Seen:
    """One span as it arrived, with its attributes as plain values and its children in the order of their start."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.name: str = span.name
        self.start_ns: int = span.start_time_unix_nano
        self.end_ns: int = span.end_time_unix_nano
        self.attributes = {entry.key: plain(entry.value) for entry in span.attributes}
        self.failed: bool = span.status.code == 2
        self.children: list[Seen] = []
        self.parent: Seen | None = None

    def tree(self) -> Any:
        """Give the names below this span: a name, or (name, [children]).

        `torch.between` is left out: every step but a thread's first has it, and it has tests of its own.
        """
        below = [child.tree() for child in self.children if child.name != "torch.between"]
        return (self.name, below) if below else self.name

    def walk(self) -> Iterator["Seen"]:
        """Yield this span and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def find(self, name: str) -> "Seen":
        """Give the only span of this name below."""
        (found,) = self.find_all(name)
        return found

    def find_all(self, name: str) -> list["Seen"]:
        """Give all spans of this name below."""
        return [seen for seen in self.walk() if seen.name == name]


def plain(value: Any) -> Any:
    """Turn an OTLP AnyValue into Python."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(entry) for entry in value.array_value.values]
    return getattr(value, kind)


def roots(spans: Iterable[Span]) -> list[Seen]:
    """Build the trees, in the order of their start; every parent must be there, every child inside its parent."""
    seen = {span.span_id: Seen(span) for span in spans}
    found = []
    for one in sorted(seen.values(), key=lambda one: one.start_ns):
        if not one.span.parent_span_id:
            found.append(one)
            continue
        assert one.span.parent_span_id in seen, f"{one.name} has a parent that never came"
        one.parent = seen[one.span.parent_span_id]
        one.parent.children.append(one)
        assert one.parent.span.trace_id == one.span.trace_id
        assert one.parent.start_ns <= one.start_ns <= one.end_ns <= one.parent.end_ns, (one.parent.name, one.name)
    return found


def tree(span: CapturedSpan) -> Any:
    """Give the names below a span that was captured, as `Seen.tree` does of one that arrived."""
    below = [tree(child) for child in span.children if child.name != "torch.between"]
    return (span.name, below) if below else span.name


class Run:
    """A program under `instrument()`, and what the receiver got of it once it has ended."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.roots: list[Seen] = []
        self.spans: list[Span] = []

    @property
    def steps(self) -> list[Seen]:
        """Give the roots of training steps."""
        return [root for root in self.roots if root.name == "torch.step"]

    @property
    def evaluations(self) -> list[Seen]:
        """Give the roots of evaluations."""
        return [root for root in self.roots if root.name == "torch.evaluation"]


@contextmanager
def recorded(detail: Any = "all", **settings: Any) -> Iterator[Run]:
    """Instrument the block and send its spans to a real receiver; nothing of ours may have failed or got lost."""
    with receiver() as server:
        handle = torchotel.instrument(endpoint=server.url.removesuffix("/v1/traces"), detail=detail, **settings)
        run = Run(handle)
        try:
            yield run
        finally:
            handle.shutdown()
        stats = handle.stats()
        assert stats["internal_errors"] == 0
        assert stats["spans_recorded"] == stats["spans_exported"] == len(server.spans)
        assert len({span.span_id for span in server.spans}) == len(server.spans)
        run.spans = list(server.spans)
        run.roots = roots(server.spans)


def rows(count: int) -> DataLoader[Tensor]:
    """Give a loader of batches of one row of four ones."""
    return DataLoader(cast("Dataset[Tensor]", list(torch.ones(count, 4))))


def train(steps: int = 3) -> None:
    """Train a model with a layer that has parameters and one that has none."""
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(steps):
        net(torch.randn(2, 4)).sum().backward()
        optimizer.step()
