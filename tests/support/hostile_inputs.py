"""Names and run folders as somebody would make them who wants to harm whoever reads them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support import run_folders as folders

NAME = "\x1b[2J\x1b]0;owned\x07<script>alert(1)</script>\"'&\r\n\u2028\u202e\u200b\x00\x9b31m`${x}%(x)s{x}\\\ud800"
"""Escapes of a terminal, markup, quotes, line breaks, a turned direction, NUL, templates, and half a character."""
LONG = "x" * 1_000_000

_HUGE = 10**400
_STEP_SPAN = folders.span("torch.step", 1, 0, 0, 100_000_000)
_NET = [_STEP_SPAN, folders.module("Net", 2, 1, 0, 40_000_000), folders.module("conv", 3, 2, 0, 30_000_000)]


def _infos() -> Iterator[tuple[str, Any]]:
    for label, text in (("names", NAME), ("long", LONG)):
        resource = {"service.name": text, "host.name": text, "torch.rank": text, "torch.world_size": 2, text: text}
        yield (
            label,
            {
                "run_id": text,
                "service_name": text,
                "torchotel.version": text,
                "model": {"name": text, "modules": 3, "parameters": 4},
                "resource": resource,
                "config": {text: text},
            },
        )
    parts = ("run_id", "service_name", "model", "resource", "config", "recording", "finished", "started_unix_nano")
    for value in ("x", [1], {"name": [1], "spans_deleted": "x"}, _HUGE):
        yield f"all {str(value)[:12]}", dict.fromkeys(parts, value)
    yield (
        "huge",
        {"model": {"name": "Net", "modules": _HUGE, "parameters": _HUGE}, "recording": {"spans_deleted": _HUGE}},
    )
    yield "list", [1, 2]


def _units() -> Iterator[tuple[str, str]]:
    for label, text in (("names", NAME), ("long", LONG)):
        named: dict[str, Any] = {
            "values": {text: 1.0, "text": text},
            "nonfinite": [text],
            "gradient_norm": 1.0,
            "gradient_norms": {text: {text: 1.0}, "b": {text: 2.0}},
        }
        yield label, json.dumps(folders.step(60, 0.1, **named, error={"type": text, "message": text}))
        yield f"{label} of a kind", json.dumps(folders.step(60, 0.1, kind=text))
    numbers = {"loss": _HUGE, "samples": 17 * 10**307, "tokens": _HUGE, "nan": float("nan"), "inf": float("inf")}
    yield "huge values", json.dumps(folders.step(60, 0.1, values=numbers))
    yield "huge times", "\n".join(json.dumps(folders.step(number, 1e308)) for number in (60, 61))
    yield "huge phases", json.dumps(folders.step(60, 0.1, phases={"data": 1e308, "forward": 1e308}))
    yield "huge numbers", "\n".join(json.dumps(folders.step(number, 0.1)) for number in (2**62, -(2**62)))
    yield "huge date", json.dumps(folders.step(60, 0.1, time_unix_nano="9" * 30))
    norms = {"a": {"b": 1e308, "c": 0, "d": -1e308, "e": True, "f": [1]}}
    yield "norms", json.dumps(folders.step(60, 0.1, gradient_norm=-1e308, gradient_norms=norms))
    yield "digits", '{"kind": "step", "duration_s": ' + "9" * 5000 + "}"
    yield "keys twice", '{"kind": "step", "kind": "evaluation", "number": 5, "number": [1]}'
    yield "types", '{"kind": ["x"], "number": true, "values": {"a": {"b": 1}}, "nonfinite": [[1], {"a": 2}]}'
    yield "error of another type", json.dumps(folders.step(60, 0.1, error=["x"]))
    yield "nested", '{"kind": "step", "values": {"x": ' + "[" * 900 + "]" * 900 + "}}"
    yield "nested deeply", '{"kind": "step", "values": {"x": ' + "[" * 100_000 + "]" * 100_000 + "}}"
    yield "bytes", "\x00\x01\x02"


def _nested(depth: int) -> str:
    value = '{"arrayValue":{"values":[' * depth + '{"stringValue":"x"}' + "]}}" * depth
    attributes = f'[{{"key":"torch.module.path","value":{value}}}]'
    return folders.request([{**_STEP_SPAN, "attributes": "ATTRIBUTES"}]).replace('"ATTRIBUTES"', attributes)


def _spans() -> Iterator[tuple[str, str]]:
    for label, text in (("names", NAME), ("long", LONG)):
        spans = [
            {**_STEP_SPAN, "name": text},
            folders.module(text, 2, 1, 0, 10, model=text),
            folders.module(text, 3, 1, 0, 10, direction=text),
            folders.span(text, 4, 1, 0, 5, **{text: text, "list": [text]}),
        ]
        yield label, folders.request(spans)
    ids = {"traceId": NAME, "spanId": NAME, "parentSpanId": NAME, "name": "torch.step", "endTimeUnixNano": "5"}
    yield "ids", folders.request([ids, {**ids, "parentSpanId": ""}])
    circle = [folders.module("a", 2, 2, 0, 10), folders.module("b", 3, 4, 0, 10), folders.module("c", 4, 3, 0, 10)]
    yield "in a circle", folders.request([*circle, _STEP_SPAN])
    yield "twice", folders.request([_STEP_SPAN, *[folders.module("a", 2, 1, 0, 10)] * 3])
    times = {"startTimeUnixNano": "-" + "9" * 30, "endTimeUnixNano": "9" * 30}
    yield "times", folders.request([_STEP_SPAN, {**folders.module("a", 2, 1, 0, 1), **times}])
    yield "steps of ever", folders.request(folders.span("torch.step", n, 0, 0, 2**62) for n in range(1, 5))
    chain = [folders.module(f"m{n}", n, n - 1, n, 10_000 - n) for n in range(2, 3000)]
    yield "a long chain", folders.request([_STEP_SPAN, *chain])
    yield "a deep path", folders.request([_STEP_SPAN, folders.module(".".join("a" * 20_000), 2, 1, 0, 100)])
    odd: tuple[dict[str, Any], ...] = (
        {"arrayValue": {"values": []}},
        {"kvlistValue": {"values": [1]}},
        {"doubleValue": "NaN"},
    )
    keys = ("torch.step.number", "thread.id", "torch.module.path")
    pairs = [{"key": key, "value": value} for key, value in zip(keys, odd, strict=True)]
    yield "types", folders.request([{**_STEP_SPAN, "attributes": pairs}])
    for depth in (50, 150, 300, 900, 100_000):
        yield f"nested {depth} deep", _nested(depth)


INFOS, UNITS, SPANS = dict(_infos()), dict(_units()), dict(_spans())
CASES = [*(("info", name) for name in INFOS), *(("unit", name) for name in UNITS), *(("span", name) for name in SPANS)]


def write(folder: Path, kind: str, name: str) -> Path:
    """Write a run of sixty good steps with one hostile thing in it."""
    info = INFOS[name] if kind == "info" else {"run_id": "run-1"}
    lines = [folders.request(_NET)] * 2
    lines[1:1] = [SPANS[name]] if kind == "span" else []
    folders.write(folder, info=info, units=(folders.step(number, 0.1) for number in range(60)), segments=[lines])
    if kind == "unit":
        with (folder / "metrics.jsonl").open("a") as steps:
            steps.write(f"{UNITS[name]}\n{json.dumps(folders.step(99, 0.1))}\n")
    return folder
