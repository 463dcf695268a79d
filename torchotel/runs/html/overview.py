"""The head of the page: what ran, how long, where the time went, and what to do first, in words."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from torchotel.runs.compare import conditions
from torchotel.runs.html.advice import BROKEN, Advice, advise, later, phase_shares
from torchotel.runs.html.data import Content
from torchotel.runs.html.style import count, cut, duration, percent, rate, shown, size
from torchotel.runs.summary import PHASES, Summary
from torchotel.runs.value_ranges import NOT_FINITE

_MOST_ADVICE = 8
_MOST_MODELS = 5


def title(content: Content) -> str:
    """Name the run."""
    return cut(content.info.get("service_name") or content.name)


def glance(content: Content) -> str:
    """Write the head as HTML."""
    parts = [f"<p class=lead>{_sentence(content)}</p>", _tiles(content)]
    if content.series.steps:
        parts.append(_shares(content))
    parts += [_todo(advise(content)), _unchecked(content.summary)]
    return "\n".join(part for part in parts if part)


def about(content: Content) -> str:
    """Write the line below the title: run, machine, versions, when."""
    resource = _mapping(content.info.get("resource"))
    parts = [
        ("run", content.info.get("run_id") or content.name),
        ("host", resource.get("host.name")),
        ("torch", resource.get("torch.version")),
        ("torchotel", content.info.get("torchotel.version")),
    ]
    world = resource.get("torch.world_size")
    if isinstance(world, int) and world > 1:
        parts.append(("rank", f"{resource.get('torch.rank')} of {world}"))
    said = [f"{name} <b>{shown(value)}</b>" for name, value in parts if value]
    began = _began(content)
    return " · ".join([*said, began] if began else said)


def settings(content: Content) -> str:
    """Write a table of program, machine, versions and settings, as the run file has them."""
    known = conditions(content.info, content.traces.devices)
    rows = "".join(f"<tr><td>{shown(name)}</td><td>{shown(value, 200)}</td></tr>" for name, value in known.items())
    return f"<div class=scroll><table class=settings><tbody>{rows}</tbody></table></div>"


def _sentence(content: Content) -> str:
    summary = content.summary
    model = _mapping(content.info.get("model"))
    what = f"<b>{shown(title(content))}</b>"
    if model.get("name"):
        parameters = model.get("parameters")
        known = f", {size(parameters)} parameters" if isinstance(parameters, int) else ""
        modules = model.get("modules")
        held = count(modules, "module") if isinstance(modules, int) else ""
        layers = [*summary.forward, *summary.backward]
        further = sorted({one.model for one in layers if one.path != one.type} - {model["name"]})
        names = ", ".join(f"<b>{shown(name)}</b>" for name in further[:_MOST_MODELS])
        others = f" and {names}" + (f" and {len(further) - _MOST_MODELS} more" if len(further) > _MOST_MODELS else "")
        what += f" ran <b>{shown(model['name'])}</b> ({held}{known}){others if further else ''}"
    if not summary.steps:
        return f"{what}: no training step, {count(summary.evaluations, 'evaluation')}."
    words = f"{what} for <b>{count(summary.steps, 'training step')}</b> in {duration(_wall_s(content))}"
    if summary.evaluations:
        words += f", with {count(summary.evaluations, 'batch')}".replace("batchs", "batches") + " of evaluation"
    (first, most), (second, more) = sorted(phase_shares(later(content)).items(), key=lambda item: -item[1])[:2]
    return (
        f"{words}. A typical step takes <b>{duration(content.median_s)}</b>; {percent(most)} of the time goes to "
        f"<b>{_spoken(first)}</b>, {percent(more)} to {_spoken(second)}."
    )


def _spoken(phase: str) -> str:
    spoken = {
        "between": "the time between steps",
        "data": "waiting for data",
        "optimizer": "the optimizer",
        "other": "what is in no phase",
    }
    return spoken.get(phase, phase)


def _tiles(content: Content) -> str:
    summary = content.summary
    tiles = []
    if summary.phases:
        step = summary.phases[0]
        tiles += [
            ("median step", duration(step.p50_s), f"95% within {duration(step.p95_s)}"),
            ("steps", f"{summary.steps:,}", f"{summary.detailed_steps:,} in detail"),
        ]
    if summary.samples_per_second:
        tiles.append(("throughput", f"{rate(summary.samples_per_second)}/s", "samples, by the wall clock"))
    elif summary.steps_per_second:
        tiles.append(("throughput", f"{rate(summary.steps_per_second)}/s", "steps, by the wall clock"))
    loss = next((track for track in summary.tracked.values if track.name == "loss"), None)
    if loss is not None:
        last = NOT_FINITE if loss.last is None else f"{loss.last:.4g}"
        tiles.append(("last loss", last, f"first {loss.first:.4g}, lowest {loss.smallest:.4g}"))
    elif "loss" in summary.tracked.nonfinite:
        tiles.append(("last loss", NOT_FINITE, "never finite"))
    if summary.phases:
        share = phase_shares(later(content))["data"]
        # Even a loader that is always ready takes some time.
        loaded = any(step.phases_s[PHASES.index("data")] for step in content.series.steps)
        said = (percent(share), "of the time of a step") if loaded else ("not seen", "no DataLoader ran")
        tiles.append(("waiting for data", *said))
    cells = "".join(
        f"<div><dt>{name}</dt><dd>{value}</dd><dd class=note>{note}</dd></div>" for name, value, note in tiles
    )
    return f"<dl class=tiles>{cells}</dl>" if tiles else ""


def _shares(content: Content) -> str:
    steps = later(content)
    mean_s = sum(step.duration_s for step in steps) / len(steps)
    shares = phase_shares(steps)
    bar = "".join(
        f'<span class="phase {name}" style="flex-grow:{share:.4f}"></span>'
        for name, share in shares.items()
        if share > 0
    )
    legend = "".join(
        f'<li><i class="phase {name}"></i>{name} <b>{percent(share)}</b> {duration(share * mean_s)}</li>'
        for name, share in shares.items()
        if share > 0
    )
    left_out = len(content.series.steps) - len(steps)
    note = f" <small>of a step, on average, without the first {left_out}</small>" if left_out else ""
    return f"<h2>Where the time goes{note}</h2><div class=shares>{bar}</div><ul class=legend>{legend}</ul>"


def _todo(found: Sequence[Advice]) -> str:
    if not found:
        return (
            "<h2>What to do first</h2><p>Nothing stands out in what was recorded: no NaN, no failed step, little "
            "waiting, no outliers, no layer that dominates.</p>"
        )
    rows = "".join(
        f'<li class="{"broken" if advice.weight >= BROKEN else "notable"}"><b>{advice.title}.</b> {advice.text}</li>'
        for advice in found[:_MOST_ADVICE]
    )
    return f"<h2>What to do first</h2><ol class=advice>{rows}</ol>"


def _unchecked(summary: Summary) -> str:
    """State how many steps were checked for NaN if none was seen."""
    checked = summary.tracked.partly_checked(summary.steps)
    return f"<p>{checked}; a NaN on other steps is not shown.</p>" if checked and not summary.tracked.onset else ""


def _wall_s(content: Content) -> float:
    return max(0, content.series.ended_unix_ns - content.series.began_unix_ns) / 1e9


def _began(content: Content) -> str:
    try:
        began = datetime.fromtimestamp(content.series.began_unix_ns / 1e9, tz=UTC)
    except (OverflowError, OSError, ValueError):  # a stranger's number
        return ""
    return f"{began:%Y-%m-%d %H:%M} UTC" if content.series.began_unix_ns else ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
