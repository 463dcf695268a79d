"""Compare recorded shapes and dtypes with the tensors that the net returns.

python examples/returned_shapes.py
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import torchotel
from torchotel.runs.reader import open_run


class Net(nn.Module):
    """Classifies short texts, and also returns the inputs and outputs of each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 16)
        self.order = nn.LSTM(16, 24, batch_first=True)
        self.mark = nn.Linear(24, 5, dtype=torch.bfloat16)

    def forward(self, ids: Tensor) -> tuple[Tensor, dict[str, tuple[list[Tensor], list[Tensor]]]]:
        """Return the scores, and the inputs and outputs of each layer."""
        vectors = self.words(ids)
        states, (last, cell) = self.order(vectors)
        summary = last[0].bfloat16()
        scores = self.mark(summary)
        passed = {
            "words": ([ids], [vectors]),
            "order": ([vectors], [states, last, cell]),
            "mark": ([summary], [scores]),
        }
        return scores, passed


def shapes(tensors: list[Tensor]) -> tuple[str, ...]:
    """Format shapes as in span attributes."""
    return tuple("x".join(map(str, tensor.shape)) for tensor in tensors)


def dtypes(tensors: list[Tensor]) -> tuple[str, ...]:
    """Format dtypes as in span attributes."""
    return tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)


with tempfile.TemporaryDirectory() as folder:
    with torchotel.instrument(record=folder, traces_exporter="none", detail="all"):
        scores, passed = Net()(torch.randint(100, (8, 12)))
        scores.float().logsumexp(1).sum().backward()
    spans = {span.name: span.attributes for span in open_run(Path(folder)).spans()}

for layer, (inputs, outputs) in passed.items():
    for side, tensors in (("input", inputs), ("output", outputs)):
        for kind, returned in (("shapes", shapes(tensors)), ("dtypes", dtypes(tensors))):
            recorded = spans[f"forward {layer}"][f"torch.{side}.{kind}"]
            verdict = "equal" if recorded == returned else "DIFFERENT"
            print(f"{layer:<6}{side:<7}{kind:<7} recorded {recorded}, returned {returned}: {verdict}")
