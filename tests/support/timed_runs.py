"""Run folders whose steps take given times."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support import run_folders as folders

PHASES = {"data": 0.1, "forward": 0.3, "backward": 0.4, "optimizer": 0.1, "other": 0.1}
LAYERS = {"conv": 0.2, "fc": 0.05, "norm": 0.001}
"""Shares of the step."""
STEP_S = 0.1
DETAIL_COST = 1.5


def write(
    folder: Path,
    *,
    seed: int = 1,
    steps: int = 60,
    detail: int = 2,
    slower: Mapping[str, float] | None = None,
    layers: Mapping[str, float] | None = None,
    first_s: float = 5.0,
    info: Mapping[str, Any] | None = None,
) -> Path:
    """Write a run with 5 % of noise.

    Args:
        folder: Where.
        seed: Of the noise.
        steps: How many.
        detail: Every how manieth is detailed; 0: none.
        slower: Factors of phases and layers.
        layers: Shares of the step by path.
        first_s: What the first step takes longer.
        info: What `run.json` says.
    """
    shares = {**PHASES, **(layers or LAYERS)}
    chance, slower, units, lines = random.Random(seed), slower or {}, [], []
    for number in range(steps):
        detailed = bool(detail) and number % detail == 0
        step_s = STEP_S * (DETAIL_COST if detailed else 1)
        times_s = {name: share * step_s * slower.get(name, 1) * chance.gauss(1, 0.05) for name, share in shares.items()}
        phases = {name: times_s[name] for name in PHASES}
        whole_s = sum(phases.values()) + (first_s if number == 0 else 0)
        units.append(folders.step(number, whole_s, phases=phases, detailed=detailed, trace_id=f"{number + 1:032x}"))
        if detailed:
            calls = _calls(number, {path: times_s[path] for path in layers or LAYERS})
            lines.append(folders.request(calls))
    return folders.write(folder, info={"run_id": "r", **(info or {})}, units=units, segments=[lines])


def _calls(number: int, times_s: Mapping[str, float]) -> Sequence[dict[str, Any]]:
    spans, at_ns = [], 0
    for place, (path, time_s) in enumerate(times_s.items(), 2):
        end_ns = at_ns + round(time_s * 1e9)
        spans.append(folders.module(path, place, 1, at_ns, end_ns, step=number))
        at_ns = end_ns
    for span in spans:
        span["traceId"] = f"{number + 1:032x}"
    return spans
