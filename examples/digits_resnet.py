"""Train torchvision's ResNet-18 on scikit-learn's handwritten digits with torchotel.

The data are 1,797 real images of 8x8 pixels, scaled up to 64x64 and repeated over three channels. Two epochs on
two cores reach a test accuracy above 90 % within two minutes.

    python examples/digits_resnet.py
    TORCHOTEL_RECORD=run python examples/digits_resnet.py --epochs 3
"""

import argparse
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import DataLoader, TensorDataset, random_split

import torchotel

try:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from sklearn.datasets import load_digits
    from torchvision.models import resnet18
except ImportError as error:
    sys.exit(f"{error}; this example needs: pip install torchvision scikit-learn rich")

Batches = DataLoader[tuple[Tensor, ...]]


def load(arguments: argparse.Namespace) -> tuple[Batches, Batches]:
    """Return batches of the training set and of the test set; the seed determines the split."""
    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    size = (arguments.image_size, arguments.image_size)
    images = interpolate(pixels, size=size, mode="bilinear").expand(-1, 3, -1, -1)
    dataset = TensorDataset((images - 0.3) / 0.35, torch.tensor(digits.target))
    train, test = random_split(dataset, [0.8, 0.2])
    workers = arguments.workers
    return (
        DataLoader(train, arguments.batch_size, shuffle=True, drop_last=True, num_workers=workers),
        DataLoader(test, 128, num_workers=workers),
    )


def train(model: nn.Module, batches: Batches, arguments: argparse.Namespace) -> None:
    """Train for `--epochs` epochs and show the progress."""
    steps = arguments.epochs * len(batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    model.train()
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=steps)
        for epoch in range(arguments.epochs):
            for images, labels in batches:
                optimizer.zero_grad()
                scores = model(images)
                torchotel.watch(scores, "scores")
                loss = cross_entropy(scores, labels)
                loss.backward()
                optimizer.step()
                schedule.step()
                right = (scores.argmax(1) == labels).float().mean()
                # Tensors are read a step later, so logging never waits for a device. The learning rate needs no call.
                torchotel.log(loss=loss, accuracy=right, epoch=epoch, samples=len(labels))
                progress.update(task, advance=1, description=f"epoch {epoch + 1}, loss {loss.item():.3f}")


def accuracy(model: nn.Module, batches: Batches) -> float:
    """Return the share of images that the model classifies correctly."""
    right = seen = 0
    model.eval()
    with torch.no_grad():
        for images, labels in batches:
            right += int((model(images).argmax(1) == labels).sum())
            seen += len(labels)
    return right / seen


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a ResNet-18 on scikit-learn's digits.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--image-size", type=int, default=64, help="pixels on a side")
    parser.add_argument("--workers", type=int, default=2, help="processes that load batches")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main() -> None:
    """Train and test."""
    arguments = parse()
    torch.manual_seed(arguments.seed)
    # The one line: from here on every step is a trace. OTEL_* and TORCHOTEL_* variables configure the export.
    torchotel.instrument()
    train_batches, test_batches = load(arguments)
    model = resnet18(weights=None, num_classes=10)
    train(model, train_batches, arguments)
    share = accuracy(model, test_batches)
    torchotel.log(test_accuracy=share)
    print(f"test accuracy {share:.1%}")


if __name__ == "__main__":
    main()
