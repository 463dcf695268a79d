"""Compute the head of the report page: the run, its duration, its phases and advice."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from torchotel._records import PHASES
from torchotel.runs.compare import run_environment
from torchotel.runs.html.advice import BROKEN, advise, after_warm_up, phase_shares, typical_steps
from torchotel.runs.html.data import Content, StepTime
from torchotel.runs.html.style import count, count_in_words, cut, duration, escaped, percent, rate
from torchotel.runs.value_ranges import NOT_FINITE

_MAX_ADVICE = 8
_MAX_MODELS = 5


class Tile(NamedTuple):
    """A key figure at the head of the page."""

    name: str
    value: str
    note: str


class PhaseShare(NamedTuple):
    """A phase's share of the time of a step, and its mean in seconds."""

    phase: str
    share: float
    mean_s: float


def overview(content: Content) -> Mapping[str, Any]:
    """Return the template variables for the head of the page and the settings; the template escapes them."""
    steps = typical_steps(content)
    summary = content.summary
    return {
        "title": _title(content),
        "about": _about(content),
        "began": _began(content),
        "sentence": _sentence(content),
        "tiles": _tiles(content),
        "shares": _shares(steps),
        "first_steps": len(content.series.steps) - len(after_warm_up(content)),
        "slowest_steps": len(after_warm_up(content)) - len(steps),
        "advice": advise(content)[:_MAX_ADVICE],
        "broken": BROKEN,
        "unchecked": "" if summary.value_ranges.onset else summary.value_ranges.partly_checked(summary.steps),
        "settings": run_environment(content.info, content.traces.devices),
    }


def _title(content: Content) -> str:
    return cut(content.info.get("service_name") or content.name)


def _about(content: Content) -> Sequence[tuple[str, object]]:
    """Return name and value of the line below the title: run, machine and versions."""
    resource = _mapping(content.info.get("resource"))
    entries = [
        ("run", content.info.get("run_id") or content.name),
        ("host", resource.get("host.name")),
        ("torch", resource.get("torch.version")),
        ("torchotel", content.info.get("torchotel.version")),
    ]
    world = resource.get("torch.world_size")
    if isinstance(world, int) and world > 1:
        entries.append(("rank", f"{resource.get('torch.rank')} of {world}"))
    return [(name, value) for name, value in entries if value]


def _sentence(content: Content) -> str:
    """Return the introductory sentences as HTML."""
    summary = content.summary
    model = _mapping(content.info.get("model"))
    subject = f"<b>{escaped(_title(content))}</b>"
    if model.get("name"):
        parameters = model.get("parameters")
        parameter_count = f", {count_in_words(parameters)} parameters" if isinstance(parameters, int) else ""
        modules = model.get("modules")
        module_count = count(modules, "module") if isinstance(modules, int) else ""
        layers = [*summary.forward, *summary.backward]
        further = sorted({layer.model for layer in layers if not layer.is_root} - {model["name"]})
        names = ", ".join(f"<b>{escaped(name)}</b>" for name in further[:_MAX_MODELS])
        further_models = f" and {names}" + (
            f" and {len(further) - _MAX_MODELS} more" if len(further) > _MAX_MODELS else ""
        )
        subject += (
            f" ran <b>{escaped(model['name'])}</b> ({module_count}{parameter_count}){further_models if further else ''}"
        )
    if not summary.steps:
        return f"{subject}: no training step, {count(summary.evaluations, 'evaluation')}."
    sentence = f"{subject} for <b>{count(summary.steps, 'training step')}</b> in {duration(_wall_s(content))}"
    if summary.evaluations:
        sentence += f", with {count(summary.evaluations, 'batch')}".replace("batchs", "batches") + " of evaluation"
    shares = sorted(phase_shares(typical_steps(content)).items(), key=lambda item: -item[1])
    (first, first_share), (second, second_share) = shares[:2]
    return (
        f"{sentence}. A typical step takes <b>{duration(content.median_s)}</b>; "
        f"{percent(first_share)} of its time goes to <b>{_phase_in_words(first)}</b>, "
        f"{percent(second_share)} to {_phase_in_words(second)}."
    )


def _phase_in_words(phase: str) -> str:
    phrases = {
        "between": "the time between steps",
        "data": "waiting for data",
        "optimizer": "the optimizer",
        "other": "what is in no phase",
    }
    return phrases.get(phase, phase)


def _tiles(content: Content) -> Sequence[Tile]:
    summary = content.summary
    tiles: list[Tile] = []
    if summary.phases:
        step = summary.phases[0]
        tiles += [
            Tile("median step", duration(step.p50_s), f"95% within {duration(step.p95_s)}"),
            Tile("steps", f"{summary.steps:,}", f"{summary.detailed_steps:,} in detail"),
        ]
    if summary.samples_per_second:
        tiles.append(Tile("throughput", f"{rate(summary.samples_per_second)}/s", "samples, by the wall clock"))
    elif summary.steps_per_second:
        tiles.append(Tile("throughput", f"{rate(summary.steps_per_second)}/s", "steps, by the wall clock"))
    loss = next((track for track in summary.value_ranges.values if track.name == "loss"), None)
    if loss is not None:
        last = NOT_FINITE if loss.last is None else f"{loss.last:.4g}"
        tiles.append(Tile("last loss", last, f"first {loss.first:.4g}, lowest {loss.smallest:.4g}"))
    elif "loss" in summary.value_ranges.nonfinite:
        tiles.append(Tile("last loss", NOT_FINITE, "never finite"))
    if summary.phases:
        share = phase_shares(typical_steps(content))["data"]
        # The fetch phase is never zero if a DataLoader ran.
        loaded = any(step.phases_s[PHASES.index("data")] for step in content.series.steps)
        tile_text = (percent(share), "of the time of a step") if loaded else ("not seen", "no DataLoader ran")
        tiles.append(Tile("waiting for data", *tile_text))
    return tiles


def _shares(steps: Sequence[StepTime]) -> Sequence[PhaseShare]:
    if not steps:
        return []
    mean_s = sum(step.duration_s for step in steps) / len(steps)
    return [PhaseShare(name, share, share * mean_s) for name, share in phase_shares(steps).items() if share > 0]


def _wall_s(content: Content) -> float:
    return max(0, content.series.ended_unix_ns - content.series.began_unix_ns) / 1e9


def _began(content: Content) -> str:
    try:
        began = datetime.fromtimestamp(content.series.began_unix_ns / 1e9, tz=UTC)
    except (OverflowError, OSError, ValueError):  # a damaged run file
        return ""
    return f"{began:%Y-%m-%d %H:%M} UTC" if content.series.began_unix_ns else ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
