"""Print recorded shapes of torchvision's ResNet-50 on one image, and check that its results are unchanged.

python examples/resnet50_shapes.py
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torchotel
from torchotel.runs.reader import open_run

try:
    from torchvision.models import resnet50
except ImportError as error:
    sys.exit(f"{error}; this example needs: pip install torchvision")

SHAPES = {"forward": ("input", "output"), "backward": ("grad_output", "grad_input")}


def train_step(model: nn.Module, image: Tensor) -> dict[str, Tensor]:
    """Return the loss and every gradient of one forward and backward."""
    model.zero_grad()
    loss = cross_entropy(model(image), torch.tensor([7]))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


torch.manual_seed(0)
model = resnet50(weights=None)
image = torch.randn(1, 3, 224, 224)
plain = train_step(model, image)

with tempfile.TemporaryDirectory() as folder:
    with torchotel.instrument(record=folder, traces_exporter="none", detail="all"):
        watched = train_step(model, image)
    spans = {span.name: span.attributes for span in open_run(Path(folder)).spans()}

for layer in ("layer3", "layer4"):
    for direction, (first, second) in SHAPES.items():
        attributes = spans[f"{direction} {layer}"]
        print(f"{direction} {layer}: {first} {attributes[f'torch.{first}.shapes']}, ", end="")
        print(f"{second} {attributes[f'torch.{second}.shapes']}")

equal = sum(torch.equal(plain[name], watched[name]) for name in plain)
print(f"loss {watched['loss'].item():.6f}, without torchotel {plain['loss'].item():.6f}")
print(f"{equal} of {len(plain)} equal bit for bit: the loss and {len(plain) - 1} gradients")
