"""Small run folders, written as torchotel writes them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TRACE = "0af7651916cd43dd8448eb211c80319c"


def attribute(key: str, value: str | float | list[str]) -> dict[str, Any]:
    kinds: dict[type, str] = {str: "stringValue", bool: "boolValue", int: "intValue", float: "doubleValue"}
    if isinstance(value, list):
        return {"key": key, "value": {"arrayValue": {"values": [{"stringValue": item} for item in value]}}}
    wire = str(value) if type(value) is int else value
    return {"key": key, "value": {kinds[type(value)]: wire}}


def module(
    path: str,
    number: int,
    parent: int,
    start_ns: int,
    end_ns: int,
    *,
    direction: str = "forward",
    model: str = "Net",
    step: int | None = 0,
) -> dict[str, Any]:
    names = {
        "torch.model": model,
        "torch.module.path": path,
        "torch.module.type": path.title(),
        "torch.direction": direction,
    }
    of_step = {} if step is None else {"torch.step.number": step}
    return span(f"{direction} {path}", number, parent, start_ns, end_ns, **names, **of_step)


def span(
    name: str,
    number: int,
    parent: int,
    start_ns: int,
    end_ns: int,
    **attributes: Any,
) -> dict[str, Any]:
    return {
        "traceId": TRACE,
        "spanId": f"{number:016x}",
        "parentSpanId": f"{parent:016x}" if parent else "",
        "name": name,
        "kind": 1,
        "startTimeUnixNano": str(start_ns),
        "endTimeUnixNano": str(end_ns),
        "attributes": [attribute(key, value) for key, value in attributes.items()],
    }


def request(spans: Iterable[Mapping[str, Any]]) -> str:
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"scope": {"name": "torchotel"}, "spans": list(spans)}]}]})


def step(number: int, duration_s: float, **more: Any) -> dict[str, Any]:
    phases = {"data": 0.1, "forward": 0.3, "backward": 0.4, "optimizer": 0.1, "other": 0.1}
    return {
        "kind": "step",
        "number": number,
        "time_unix_nano": "1700000000000000000",
        "duration_s": duration_s,
        "phases": {name: share * duration_s for name, share in phases.items()},
        "detailed": True,
        "trace_id": TRACE,
        "error": None,
        **more,
    }


def write(
    folder: Path,
    *,
    info: Mapping[str, Any] | None = None,
    units: Iterable[Mapping[str, Any]] = (),
    segments: Iterable[Iterable[str]] = (),
) -> Path:
    folder.mkdir(parents=True)
    if info is not None:
        (folder / "run.json").write_text(json.dumps(info))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(unit) + "\n" for unit in units))
    for number, lines in enumerate(segments, 1):
        (folder / f"trace-{number:05}.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def net(folder: Path) -> Path:
    """Write two steps of a net of two layers, forward and backward, and an evaluation."""
    forward = [
        span("torch.step", 1, 0, 0, 100_000_000),
        module("Net", 2, 1, 0, 40_000_000),
        module("conv", 3, 2, 0, 30_000_000),
        module("fc", 4, 2, 30_000_000, 35_000_000),
    ]
    backward = [
        module("Net", 5, 1, 50_000_000, 90_000_000, direction="backward"),
        module("fc", 6, 5, 50_000_000, 60_000_000, direction="backward"),
        module("conv", 7, 5, 60_000_000, 90_000_000, direction="backward"),
    ]
    units = [step(0, 0.1), step(1, 0.3, detailed=False), step(0, 0.05, kind="evaluation", detailed=False)]
    info = {
        "run_id": "run-1",
        "service_name": "train.py",
        "model": {"name": "Net", "modules": 3, "parameters": 1200},
        "finished": True,
    }
    return write(folder, info=info, units=units, segments=[[request(forward)], [request(backward)]])
