"""Run folders that have something to show in every figure of the page."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from support import run_folders
from torchotel.runs import open_run
from torchotel.runs.html import Content, document, gather

LAYERS = ("Net", "conv", "blocks.0", "blocks.0.up", "blocks.0.down", "head")
MS = 1_000_000


def training(
    folder: Path,
    steps: int = 30,
    *,
    duration_s: Callable[[int], float] = lambda number: 0.1,
    detail: int = 3,
    rename: Callable[[str], str] = lambda name: name,
    info: Mapping[str, Any] | None = None,
    **more: Any,
) -> Path:
    """Write a training run; `rename` is applied to every name that a stranger could choose, `more` to every step."""
    units, lines = [], []
    for number in range(steps):
        detailed = number % detail == 0
        unit = run_folders.step(number, duration_s(number), detailed=detailed, trace_id=f"{number + 1:032x}")
        unit["values"] = {"loss": 1 / (number + 1), "lr": 0.1, "samples": 8, rename("accuracy"): 0.5}
        if detailed:
            unit["gradient_norm"] = 2.0
            unit["gradient_norms"] = {rename("Net"): {rename(path): 1 + place for place, path in enumerate(LAYERS)}}
        units.append({**unit, **more})
        lines.append(run_folders.request(_spans(number, duration_s(number), rename, detailed=detailed)))
    known = {"service_name": rename("train"), "model": {"name": rename("Net"), "modules": 6, "parameters": 1000}}
    return run_folders.write(folder, info={**known, "finished": True, **(info or {})}, units=units, segments=[lines])


def _spans(number: int, duration_s: float, rename: Callable[[str], str], *, detailed: bool) -> list[dict[str, Any]]:
    scale = duration_s / 0.1

    def span(name: str, identity: int, parent: int, start_ms: float, end_ms: float, **more: Any) -> dict[str, Any]:
        made = run_folders.span(name, identity, parent, int(start_ms * scale * MS), int(end_ms * scale * MS), **more)
        return {**made, "traceId": f"{number + 1:032x}"}

    def module(path: str, identity: int, parent: int, start: float, end: float, direction: str) -> dict[str, Any]:
        kind = path if path == "Net" else path.rpartition(".")[2].title()
        where = {"torch.model": rename("Net"), "torch.module.path": rename(path), "torch.module.type": rename(kind)}
        of_step = {"torch.direction": direction, "torch.step.number": number}
        return span(rename(f"{direction} {path}"), identity, parent, start, end, **where, **of_step)

    spans = [
        span("torch.step", 1, 0, 0, 100, **{"torch.step.number": number}),
        span("torch.data", 2, 1, 0, 10),
        span("torch.forward", 3, 1, 10, 40),
        span("torch.backward", 4, 1, 40, 80),
        span("torch.optimizer.step", 5, 1, 80, 90),
    ]
    if detailed:
        for direction, first, start, end in (("forward", 10, 10.0, 40.0), ("backward", 20, 40.0, 80.0)):
            part = (end - start) / 10
            places = {
                "conv": (0, 3),
                "blocks.0": (3, 8),
                "blocks.0.up": (3, 5),
                "blocks.0.down": (5, 8),
                "head": (8, 9),
            }
            spans.append(module("Net", first, 3 if direction == "forward" else 4, start, end, direction))
            for index, (path, (low, high)) in enumerate(places.items(), 1):
                parent = first + 2 if path.startswith("blocks.0.") else first
                spans.append(module(path, first + index, parent, start + low * part, start + high * part, direction))
    return spans


def content(folder: Path) -> Content:
    return gather(open_run(folder))


def head(shown: Content) -> str:
    """Return the head of a page as HTML."""
    return document(shown).partition('<section id="glance">')[2].partition("</section>")[0]
