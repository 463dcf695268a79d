"""Check and measure torchotel on a GPU in ten minutes: `make gpu`.

Runs the tests that need CUDA, trains the models of `make fidelity` with and without torchotel, and then measures
ResNet-50 and GPT-2 small: the cost of a step beside `torch.profiler`, memory, synchronisations, and device times beside
the profiler's. Without CUDA the measurements run on a tiny model, which shows only that they run.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences torch.profiler; read when torch is loaded

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import pages
from benchmarks.interleave import NOTHING, Lengths, Mode, Pair, Running, interleave
from benchmarks.modes import AGAIN, ALL, DEFAULT, PROFILER, paused_session, resumed
from benchmarks.parts import Cell, Conditions, Part, Table
from benchmarks.sink import Sink
from benchmarks.spread import spread
from torchotel.testing import capture

PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"
TESTS = (sys.executable, "-m", "pytest", "-q", "-m", "cuda", "tests/capture", "tests/fidelity")
FIDELITY = (sys.executable, "-m", "fidelity", "--device", "cuda", "--processes", str(min(8, os.cpu_count() or 1)))
STEPS = 5
"""Steps in which synchronisations are counted, memory is measured, and device times are taken."""
MODELS = """### Models, with and without torchotel

`python -m fidelity --device cuda` trains each model of [Fidelity](fidelity.md), with algorithms that repeat results. It
compares all computed numbers bit for bit, and the trace and the gradient norms with independent counts and sums.
"""
MIN_TIME_S = 50e-6
"""Shorter device times are not compared: the clock's steps are 0.5 µs, and gaps between kernels count."""
SYNCHRONISES = "called a synchronizing CUDA operation"
"""Part of the warning of `torch.cuda.set_sync_debug_mode`."""
say = partial(print, flush=True)


class Training(NamedTuple):
    """A model on a device, and one step of its training."""

    name: str
    model: nn.Module
    forward_backward: Callable[[], None]
    step: Callable[[], None]


def main(words: Sequence[str] | None = None) -> int:
    """Run the tests, measure, print the tables, and write the page if there is a GPU; return pytest's exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__, allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=150, help="measuring time of each model's cost (%(default)s)")
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    options = parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = _machine(device)
    say(machine)
    code = 0 if options.no_tests else subprocess.call(TESTS, cwd=PAGE.parents[1])
    sections = [machine]
    if device.type == "cuda" and not options.no_tests:
        models_code, section = _models()
        code = code or models_code
        sections.append(section)
    trainings = (_resnet50, _gpt2) if device.type == "cuda" else (_tiny,)
    for make in trainings:
        training = make(device)
        for part in _parts(training, device, options.seconds):
            with Sink() as sink:
                table = part.measure(Conditions(sink, quick=False, longer=1, memory_steps=0, tell=_tell))
            sections.append(pages.section(part, table))
            say(f"\n{sections[-1]}")
    if device.type == "cuda":
        PAGE.write_text("# Measurements on a GPU\n\n" + "\n\n".join(sections) + "\n", encoding="utf-8")
        say(f"\n{PAGE} was written")
    else:
        say("\nNo GPU was found: the figures above are of a tiny model on the CPU, and no page was written")
    return code


def _models() -> tuple[int, str]:
    """Train the models of `make fidelity` with and without torchotel; return the exit code and the page's section."""
    path = os.pathsep.join(str(PAGE.parents[1] / folder) for folder in (".", "tests"))
    section = [MODELS]
    with subprocess.Popen(
        FIDELITY, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    ) as checking:
        assert checking.stdout is not None
        for line in checking.stdout:
            print(line, end="", flush=True)
            if not line.startswith("["):  # the progress
                section.append("- " + line.strip().strip("| ").replace(" | ", ", "))
    if checking.returncode not in {0, 1}:
        section.append(f"- the check ended with exit code {checking.returncode}, so not all models were trained")
    return checking.returncode, "\n".join(section)


def _tell(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU"
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPU cores"


# ---- trainings


def _training(name: str, model: nn.Module, loss: Callable[[nn.Module], Tensor], device: torch.device) -> Training:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    last: list[Any] = []

    def forward_backward() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            value = loss(model)
        value.backward()

    def step() -> None:
        forward_backward()
        optimizer.step()
        if device.type == "cuda":  # at most one step is queued, so that a block's time is that of its steps
            if last:
                last.pop().synchronize()
            last.append(torch.cuda.Event())
            last[-1].record()

    for _ in range(3):  # algorithms are chosen, and memory is reserved
        step()
    return Training(name, model, forward_backward, step)


def _resnet50(device: torch.device) -> Training:
    from torchvision.models import resnet50  # noqa: PLC0415  # an extra, and slow to import

    torch.manual_seed(0)
    images = torch.randn(256, 3, 224, 224, device=device)
    classes = torch.randint(1000, (256,), device=device)
    model = resnet50().to(device)
    return _training(
        "ResNet-50, bf16, batch 256", model, lambda model: functional.cross_entropy(model(images), classes), device
    )


def _gpt2(device: torch.device) -> Training:
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415  # an extra, and slow to import

    torch.manual_seed(0)
    tokens = torch.randint(50257, (8, 1024), device=device)
    model: nn.Module = GPT2LMHeadModel(GPT2Config())
    model.to(device)
    return _training(
        "GPT-2 small, bf16, 8 texts of 1,024 tokens", model, lambda model: model(tokens, labels=tokens).loss, device
    )


def _tiny(device: torch.device) -> Training:
    torch.manual_seed(0)
    rows = torch.randn(64, 256, device=device)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4))).to(device)
    return _training("a tiny model", model, lambda model: model(rows).square().mean(), device)


# ---- what is measured


def _parts(training: Training, device: torch.device, seconds: float) -> Iterator[Part]:
    yield Part(
        "cost",
        f"{training.name}: cost of a step",
        "Wall time, in turns with blocks without an instrument. `torch.profiler` records operators and kernels, without"
        " shapes, and writes no file. Memory is the largest amount that tensors had; the CPU reports none.",
        lambda conditions: _cost(training, device, conditions, seconds),
    )
    yield Part(
        "synchronisations",
        f"{training.name}: synchronisations of {STEPS} steps",
        "Warnings of `torch.cuda.set_sync_debug_mode`. The CPU has nothing to synchronise with.",
        lambda _: _synchronisations(training, device),
    )
    yield Part(
        "times",
        f"{training.name}: device times beside torch.profiler's",
        f"The time of each forward that takes more than {MIN_TIME_S * 1e6:.0f} µs, divided by the profiler's sum of its"
        " kernels, in other steps. Only torchotel's times include gaps between kernels. On the CPU the durations of all"
        " forwards are compared, and both include the cost of the instrument.",
        lambda _: _times(training, device),
    )


def _cost(training: Training, device: torch.device, conditions: Conditions, seconds: float) -> Table:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]

    @contextmanager
    def profiler() -> Iterator[Running]:
        with profile(activities=activities):
            yield Running()

    sink = conditions.sink
    # The deepest modules would be folded with the default max_spans.
    with paused_session(sink) as default, paused_session(sink, detail="all", max_spans=None) as everything:
        modes = [
            Mode(AGAIN, NOTHING.enter),
            Mode(DEFAULT, lambda: resumed(default)),
            Mode(ALL, lambda: resumed(everything)),
            Mode(PROFILER, profiler),
        ]
        pairs = interleave(modes, training.step, sink, Lengths(seconds / 150, seconds / 75, seconds), conditions.tell)
        memory = {mode.name: _peak_mib(mode, training, device) for mode in modes}
    return {name: _row(found, memory[name]) for name, found in pairs.items()}


def _row(pairs: Sequence[Pair], memory_mib: float | str) -> dict[str, Cell]:
    made = sum(pair.sent.made for pair in pairs)
    lost = f"{1 - sum(pair.sent.arrived for pair in pairs) / made:.1%}" if made else "-"
    return {
        "ms per step": spread([pair.with_it.wall_us / 1000 for pair in pairs]),
        "ratio": spread([pair.with_it.wall_us / pair.without.wall_us for pair in pairs]),
        "CPU ratio": spread([pair.with_it.cpu_us / pair.without.cpu_us for pair in pairs]),
        "spans lost": lost,
        "memory, MiB": memory_mib,
    }


def _peak_mib(mode: Mode, training: Training, device: torch.device) -> float | str:
    if device.type != "cuda":
        return "-"
    torch.cuda.reset_peak_memory_stats()
    with mode.enter() as running:
        for _ in range(STEPS):
            training.step()
    running.drain()
    return torch.cuda.max_memory_allocated() / 2**20


def _synchronisations(training: Training, device: torch.device) -> Table:
    return {
        "no instrument": {"synchronisations": _count_synchronisations(training, device, detail=None)},
        ALL: {"synchronisations": _count_synchronisations(training, device, detail="all")},
    }


def _count_synchronisations(training: Training, device: torch.device, *, detail: str | None) -> int:
    with (
        capture(detail=detail) if detail is not None else nullcontext(),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(STEPS):
                training.forward_backward()
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    return sum(SYNCHRONISES in str(warning.message) for warning in caught)


def _times(training: Training, device: torch.device) -> Table:
    with capture(detail="all", gradient_norms=False, max_spans=None) as captured:
        for _ in range(STEPS):
            training.step()
    ours: dict[str, list[float]] = {}
    for step in captured.steps:
        for span in step.walk():
            if span.name.startswith("forward "):
                time_s = span.attributes.get("torch.device_time")
                ours.setdefault(span.name, []).append(time_s if isinstance(time_s, float) else span.duration_s)
    theirs = _profiled(training, device)
    min_time_s = MIN_TIME_S if device.type == "cuda" else 0
    ratios = [median(times_s) / theirs[name] for name, times_s in ours.items() if theirs.get(name, 0) > min_time_s]
    return {"forwards": {"compared": len(ratios), "torchotel / profiler": spread(ratios)}}


def _profiled(training: Training, device: torch.device) -> Mapping[str, float]:
    """Return the mean time of each forward by the profiler, in seconds, by the names of torchotel's spans."""
    ranges: dict[nn.Module, Any] = {}
    handles = []
    for path, module in training.model.named_modules():
        name = f"forward {path or type(module).__name__}"

        def before(module: nn.Module, _: object, name: str = name) -> None:
            ranges[module] = record_function(name)
            ranges[module].__enter__()

        def after(module: nn.Module, *_: object) -> None:
            ranges.pop(module).__exit__(None, None, None)

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            training.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    for handle in handles:
        handle.remove()
    measured = "device_time_total" if device.type == "cuda" else "cpu_time_total"
    return {
        event.key: getattr(event, measured) / event.count / 1e6
        for event in profiler.key_averages()
        if event.key.startswith("forward ")
    }


if __name__ == "__main__":
    sys.exit(main())
