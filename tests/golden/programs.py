"""Twelve small programs that each show one kind of training or serving, recorded in full detail.

python -m golden.programs NAME FOLDER
"""

import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from opentelemetry.sdk.trace import TracerProvider
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import torchotel

PROGRAMS: dict[str, Callable[[], None]] = {}
STEPS = 2
TRACER = TracerProvider().get_tracer("program")


def program(function: Callable[[], None]) -> Callable[[], None]:
    """Add a function to `PROGRAMS`."""
    PROGRAMS[function.__name__] = function
    return function


class Net(nn.Module):
    """Two layers and an activation, below names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape (N, 2) for x of shape (N, 4)."""
        logits: Tensor = self.head(self.body(x))
        return logits


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def loader() -> Iterator[list[Tensor]]:
    return iter(DataLoader(TensorDataset(torch.ones(6, 4)), batch_size=3))


@program
def loop() -> None:
    """A DataLoader, a scheduler, logged values and a validation."""
    model = Net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for (x,) in loader():
        train(model, optimizer, x)
        scheduler.step()
        torchotel.log(loss=0.5, samples=len(x), accuracy=0.25)
    model.eval()
    with torch.no_grad():
        for (x,) in loader():
            model(x)


@program
def gan() -> None:
    """Two optimizers make one step."""
    generator, discriminator = nn.Linear(2, 4), Net()
    torchotel.name(generator, "generator")
    torchotel.name(discriminator, "discriminator")
    for_generator, for_discriminator = sgd(generator), sgd(discriminator)
    for (real,) in loader():
        fake = generator(torch.ones(3, 2))
        for_discriminator.zero_grad()
        (discriminator(fake.detach()).mean() - discriminator(real).mean()).backward()
        for_discriminator.step()
        for_generator.zero_grad()
        discriminator(fake).mean().backward()
        for_generator.step()


@program
def accumulation() -> None:
    """Two backwards for each optimizer step, with gradients clipped."""
    model = Net()
    optimizer = sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.ones(3, 4)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


@program
def compiled() -> None:
    """One layer is compiled: its call is seen, what it compiles is not."""
    model = Net()
    model.body = torch.compile(model.body, backend="eager")  # type: ignore[assignment]  # typed as a function
    optimizer = sgd(model)
    for _ in range(STEPS):
        train(model, optimizer, torch.ones(3, 4))


@program
def checkpointing() -> None:
    """The body runs again in the backward."""
    model = Net()
    optimizer = sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.head(checkpoint(model.body, torch.ones(3, 4), use_reentrant=False)).mean().backward()
        optimizer.step()


@program
def exception() -> None:
    """A layer raises in the second step, and the program goes on."""
    model = Net()
    optimizer = sgd(model)
    for size in (4, 5, 4):
        try:
            train(model, optimizer, torch.ones(3, size))
        except RuntimeError:
            continue


@program
def nan() -> None:
    """A weight becomes NaN after the first step."""
    model = Net()
    optimizer = sgd(model)
    for _ in range(STEPS):
        train(model, optimizer, torch.ones(3, 4))
        torchotel.log(loss=model(torch.ones(1, 4)).mean().item())
        with torch.no_grad():
            model.head.weight[0, 0] = torch.nan


@program
def evaluation_under_span() -> None:
    """A validation in a span of the program's, and spans inside a forward."""

    class Traced(Net):
        def forward(self, x: Tensor) -> Tensor:
            with TRACER.start_as_current_span("lookup"):
                return super().forward(x)

    model = Traced()
    train(model, sgd(model), torch.ones(3, 4))
    with TRACER.start_as_current_span("validation"), torch.no_grad():
        for _ in range(STEPS):
            model.eval()(torch.ones(3, 4))


@program
def two_models() -> None:
    """A teacher without gradients and a student, of one class."""
    teacher, student = Net(), Net()
    torchotel.name(teacher, "teacher")
    torchotel.name(student, "student")
    optimizer = sgd(student)
    for (x,) in loader():
        with torch.no_grad():
            target = teacher(x)
        optimizer.zero_grad()
        (student(x) - target).square().mean().backward()
        optimizer.step()


@program
def serving() -> None:
    """Each request has a span, and one of them fails."""
    model = Net().eval()
    for size in (4, 5, 4):
        try:
            with TRACER.start_as_current_span("request"), torch.inference_mode():
                model(torch.ones(1, size))
        except RuntimeError:
            continue


@program
def frozen() -> None:
    """The body has no gradients."""
    model = Net()
    model.body.requires_grad_(requires_grad=False)
    optimizer = sgd(model)
    for _ in range(STEPS):
        train(model, optimizer, torch.ones(3, 4))


@program
def second_thread() -> None:
    """Another thread trains a model of its own after the main one."""
    first, second = Net(), nn.Linear(4, 1)
    optimizer = sgd(first)
    train(first, optimizer, torch.ones(3, 4))
    thread = threading.Thread(target=train, args=(second, sgd(second), torch.ones(3, 4)))
    thread.start()
    thread.join()
    train(first, optimizer, torch.ones(3, 4))


def main(name: str, folder: Path) -> None:
    """Run a program and record it into `folder`, with the last scrape as `scrape.txt`."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    handle = torchotel.instrument(record=folder, detail="all", prometheus_port=0, traces_exporter="none")
    PROGRAMS[name]()
    handle.flush()
    with urllib.request.urlopen(f"http://127.0.0.1:{handle.prometheus_port}/metrics") as response:
        scrape = response.read()
    handle.shutdown()
    (folder / "scrape.txt").write_bytes(scrape)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
