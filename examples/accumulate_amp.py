"""Accumulate gradients over four batches in mixed precision, with clipping: one step for each optimizer step.

    python examples/accumulate_amp.py

In Jaeger (http://localhost:16686) each step has four forwards, four backwards and one optimizer step. The attribute
`torch.output.dtypes` of the layers shows the dtypes under autocast. `torch.gradient.norm` of the step is the norm
before clipping and without GradScaler's scale, as `clip_grad_norm_` returns it. The program prints both for the last
step.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import torchotel
from torchotel.runs.reader import open_run

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    sys.exit(f"{error}; this example needs: pip install scikit-learn")

ACCUMULATED = 4
MAX_NORM = 1.0


def train(device: str) -> float:
    """Train one epoch and return the last gradient norm that `clip_grad_norm_` returned."""
    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    batches = DataLoader(TensorDataset(pixels, torch.tensor(digits.target)), 32, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler(device)
    norm = torch.tensor(0.0)
    for number, (images, labels) in enumerate(batches, 1):
        with torch.autocast(device, dtype=torch.bfloat16 if device == "cpu" else torch.float16):
            loss = cross_entropy(model(images.to(device)), labels.to(device))
        scaler.scale(loss / ACCUMULATED).backward()
        torchotel.log(loss=loss, samples=len(images))  # on the current step: the last loss is kept, samples add up
        if number % ACCUMULATED == 0:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return norm.item()


def main() -> None:
    """Train, and compare the recorded norm with that of `clip_grad_norm_`."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        with torchotel.instrument(record=folder, gradient_norms=True):
            clipped = train("cuda" if torch.cuda.is_available() else "cpu")
        steps = [record for record in open_run(Path(folder)).records() if record.kind == "step"]
    last = steps[-1].values
    print(f"{len(steps)} steps of {last['samples']} samples")
    print(f"gradient norm recorded {steps[-1].gradient_norm:.6f}, by clip_grad_norm_ {clipped:.6f}")


if __name__ == "__main__":
    main()
