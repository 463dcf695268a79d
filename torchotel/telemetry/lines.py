"""The lines of a run file's `metrics.jsonl`: one a step, an evaluation, or a late log."""

from __future__ import annotations

from collections.abc import Sequence

from torchotel._records import GradientNorms, Log, Unit
from torchotel.telemetry.phases import phase_times_s


def unit_line(unit: Unit, trace_id: int, nonfinite: Sequence[str]) -> dict[str, object]:
    """Describe a step or an evaluation: duration, phases, what was logged, norms; times are in seconds."""
    line: dict[str, object] = {
        "kind": unit.kind,
        "number": unit.number,
        "time_unix_nano": str(unit.start_ns + unit.unix_offset_ns),
        "duration_s": (unit.end_ns - unit.start_ns) / 1e9,
        "phases": phase_times_s(unit),
        "detailed": unit.detailed,
        "folded": unit.folded,
        "trace_id": f"{trace_id:032x}",
        "error": _error(unit),
    }
    if unit.folded:
        line["folded_s"] = unit.folded_ns / 1e9
    if unit.gap_ns:
        line["gap_s"] = unit.gap_ns / 1e9
    if unit.kind == "evaluation":
        line["grad"], line["training"] = unit.grad, unit.training
    if unit.values:
        line["values"] = unit.values
    if unit.gradients is not None:
        line["gradient_norm"] = unit.gradients.total
        line["gradient_norms"] = _by_model(unit.gradients)
    if unit.tensor_gradients:
        line["tensor_gradient_norms"] = {gradient.name: gradient.norm for gradient in unit.tensor_gradients}
    if unit.memory:
        line["memory"] = [memory._asdict() for memory in unit.memory]
    if nonfinite:
        line["nonfinite"] = nonfinite
    return line


def log_line(log: Log) -> dict[str, object]:
    """Describe what was logged when its step had been handed over."""
    return {"kind": "log", "number": log.step, "time_unix_nano": str(log.unix_ns), "values": log.values}


def _error(unit: Unit) -> dict[str, object] | None:
    """Describe what the unit failed with, and the phase that raised it: backward, or None for all others."""
    if unit.error is None:
        return None
    phase = next((phase.kind for phase in unit.phases if phase.error == unit.error), None)
    return {**unit.error._asdict(), "phase": phase}


def _by_model(gradients: GradientNorms) -> dict[str, dict[str, float]]:
    models: dict[str, dict[str, float]] = {}
    for module, norm in gradients.modules:
        models.setdefault(module.model, {})[module.path] = norm
    return models
