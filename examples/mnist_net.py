"""Train the net of PyTorch's basic MNIST example for three steps on random images, and print the last step.

python examples/mnist_net.py
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import torchotel
from torchotel.runs.reader import SpanLine, open_run


class Net(nn.Module):
    """Two convolutions and two linear layers; relu, pooling and softmax are functions, so they have no spans."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the log-probabilities of the ten digits."""
        x = functional.relu(self.conv1(x))
        x = functional.relu(self.conv2(x))
        x = functional.max_pool2d(x, 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = functional.relu(self.fc1(x))
        return functional.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def train(net: Net) -> None:
    """Take three steps."""
    optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0)
    for _ in range(3):
        images, labels = torch.randn(16, 1, 28, 28), torch.randint(10, (16,))
        optimizer.zero_grad()
        functional.nll_loss(net(images), labels).backward()
        optimizer.step()


def show(span: SpanLine, spans: list[SpanLine], depth: int = 0) -> None:
    """Print a span and its descendants, each with its time."""
    print(f"{'  ' * depth}{span.name:<{44 - 2 * depth}} {(span.end_ns - span.start_ns) / 1e6:8.3f} ms")
    for child in spans:
        if child.parent_id == span.span_id:
            show(child, spans, depth + 1)


with tempfile.TemporaryDirectory() as folder:
    handle = torchotel.instrument(record=folder, traces_exporter="none", detail="all")
    train(Net())
    handle.shutdown()
    spans = sorted(open_run(Path(folder)).spans(), key=lambda span: span.start_ns)
steps = [span for span in spans if span.name == "torch.step"]
show(steps[-1], spans)
