"""Train a GAN on scikit-learn's handwritten digits, with two optimizers and one step for each batch.

    python examples/gan.py

In Jaeger (http://localhost:16686) each batch is one trace with three forwards and backwards (real digits, generated
digits, and generated digits again to train the generator) and two optimizer steps. Below them are the layers of both
models, named by `torchotel.name` and distinguished by `torch.model`. `torch.call.index` numbers the calls of the
discriminator.
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import torchotel

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    sys.exit(f"{error}; this example needs: pip install scikit-learn")

NOISE = 16


def loss_against(answer: float, scores: Tensor) -> Tensor:
    """Return the loss of scores for one target."""
    return binary_cross_entropy_with_logits(scores, torch.full_like(scores, answer))


def main() -> None:
    """Train three epochs."""
    torch.manual_seed(0)
    handle = torchotel.instrument()
    pixels = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    batches = DataLoader(TensorDataset(pixels), batch_size=128, shuffle=True)
    generator = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
    discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    torchotel.name(generator, "generator")  # both have the class Sequential
    torchotel.name(discriminator, "discriminator")
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
    n_batches = 0
    for epoch in range(3):
        for (real,) in batches:
            made_up = generator(torch.randn(len(real), NOISE))

            discriminator_optimizer.zero_grad()
            on_real = loss_against(1, discriminator(real))
            on_real.backward()
            on_made_up = loss_against(0, discriminator(made_up.detach()))
            on_made_up.backward()
            discriminator_optimizer.step()

            generator_optimizer.zero_grad()
            loss = loss_against(1, discriminator(made_up))
            loss.backward()
            generator_optimizer.step()

            discriminator_loss = on_real.detach() + on_made_up.detach()
            torchotel.log(loss=loss, discriminator_loss=discriminator_loss, samples=len(real), epoch=epoch)
            n_batches += 1
    handle.shutdown()  # exports the remaining spans, so that the numbers below are final
    print(f"{n_batches} batches, {handle.stats()['steps']} steps, {handle.stats()['spans_recorded']} spans")


if __name__ == "__main__":
    main()
