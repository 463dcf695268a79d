"""Train on handwritten digits, one rank per pod, with the details of one rank in 64."""

import os

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import torchotel

EPOCHS = 5


def main() -> None:
    """Train with the rank and the address that the Job's environment gives."""
    rank = int(os.environ["RANK"])
    torchotel.instrument(detail="auto" if rank % 64 == 0 else "off")  # the others send steps and phases
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    images, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32), torch.tensor(digits))
    loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data))
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(EPOCHS):
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torchotel.log(loss=loss, samples=len(inputs), epoch=epoch)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
