"""Rules that derive advice from the numbers of a run; pure."""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from torchotel.runs.compare import WARM_UP_STEPS
from torchotel.runs.html.data import Content, StepTime
from torchotel.runs.html.style import count, cut, duration, percent, shown
from torchotel.runs.summary import PHASES, LayerTime, Summary, ending, has_several_models
from torchotel.runs.value_ranges import Onset

DATA_SHARE = 0.1
OPTIMIZER_SHARE = 0.2
BETWEEN_SHARE = OTHER_SHARE = 0.15
LAYER_SHARE = 0.3
HOOKS_S = 20e-6
"""Time of torchotel's hooks in the self time of a module, for each module call inside it: measured, 6 to 17 µs."""
OUTERMOST_HOOKS_S = 100e-6
"""Time of torchotel's hooks around an outermost module call, in the forward phase: measured, 50 to 100 µs."""
OUTSIDE_SHARE = 0.5
OUTLIERS = 20
"""Of so many steps the slowest one decides no advice on a phase."""
SLOW_RATIO = 2.0
"""A step that takes so many times the median is an outlier."""
WORTHWHILE = 0.1
"""Of the time of steps; what takes less is not worth a change."""
DRIFT = 0.15
VANISHING = 1e-4
"""Of the largest layer's norm."""
SPIKE = 20.0
"""Times the median norm."""
FEW_DETAILED = 5
GROWN = 5.0
"""Times the median loss."""
BROKEN = 2
"""Weight from which on the run itself is in question, not its speed."""

HAVE_MODULES = "With <code>torchotel run --detail all</code> every step has its modules."
_LOSS = "loss"
_FEWEST_STEPS = 20
"""Below that, shares of the first steps say little about the rest."""


class Advice(NamedTuple):
    """One thing that stands out."""

    weight: float
    """The heaviest comes first: what is broken has BROKEN and more, the rest the share of time that is at stake."""
    title: str
    """Plain text, which the template escapes."""
    text: str
    """HTML: names from the run are escaped in it."""


def advise(content: Content) -> Sequence[Advice]:
    """Name what stands out in a run, what to do first at the top."""
    found = [advice for rule in _RULES for advice in rule(content)]
    return sorted(found, key=lambda advice: -advice.weight)


def later(content: Content) -> Sequence[StepTime]:
    """Leave the first steps out, where enough of others follow."""
    steps = content.series.steps
    return steps[WARM_UP_STEPS:] if len(steps) >= _FEWEST_STEPS else steps


def usual(content: Content) -> Sequence[StepTime]:
    """Leave the slowest steps out of the later ones, which have an advice of their own.

    Medians of phases would hide waits of every n-th step, as with several workers of a DataLoader.
    """
    steps = later(content)
    slowest = max(1, len(steps) // OUTLIERS) if len(steps) >= WARM_UP_STEPS else 0
    return sorted(steps, key=lambda step: step.duration_s)[: len(steps) - slowest]


def phase_shares(steps: Sequence[StepTime]) -> dict[str, float]:
    """Share the time of steps out to their phases."""
    whole_s = sum(step.duration_s for step in steps) or 1.0
    return {name: sum(step.phases_s[place] for step in steps) / whole_s for place, name in enumerate(PHASES)}


def _nonfinite(content: Content) -> Iterator[Advice]:
    onset = content.summary.tracked.onset
    if onset is None:
        return
    words = ["The loss was NaN or infinite." if onset.loss else "A gradient was NaN or infinite."]
    if onset.layers:
        words.append(f"The first layers: <b>{shown(onset.first_layers(), 300)}</b>{_of_step(onset)}.")
    elif content.info.get("finished") is not False:
        words.append("No gradient norm was recorded after it: <code>gradient_norms=True</code> names the layers.")
    before = [("loss", onset.loss_before), ("norm of all gradients", onset.gradient_norm_before)]
    values = " and ".join(f"a {name} of {at}" for name, at in before if at is not None)
    if values:
        words.append(f"The last finite values before: {values}.")
    words.append(_cause(content, onset))
    if any(math.isinf(norm) for row in content.series.norms.values() for norm in row):
        words.append('Red cells in the <a href="#norms">gradient norms by layer</a> are such gradients.')
    # Without a loss only steps with gradient norms are looked at.
    began = "began" if onset.loss or onset.loss_here is not None else "was first seen"
    yield Advice(4, f"NaN or infinity {began} at {onset.kind} {onset.number:,}", " ".join(words))


def _of_step(onset: Onset) -> str:
    return "" if onset.layers_step == onset.number else f" (by the gradients of step {onset.layers_step:,})"


def _cause(content: Content, onset: Onset) -> str:
    """Say where to look: in the growth of the loss, in the backward, or in the batch."""
    if not onset.loss and onset.loss_here is None:
        checked = (
            content.summary.tracked.partly_checked(content.summary.steps) or "The loss of that step was not logged"
        )
        return (
            f"{checked}; it may have begun on an earlier step, in the batch, the loss or the backward. Log the loss "
            "with <code>torchotel.log(loss=loss)</code> to see the step."
        )
    if onset.loss and onset.loss_before is None:
        return "No loss before it was finite: check the inputs, the labels and the initial parameters."
    numbers, losses = content.series.logged.get(_LOSS, ((), ()))
    before = [loss for number, loss in zip(numbers, losses, strict=True) if number < onset.number]
    typical = median(before) if before else math.inf
    last = onset.loss_here if onset.loss_here is not None else onset.loss_before.value if onset.loss_before else 0.0
    if last > GROWN * typical:
        return (
            f"The loss had grown to {last / typical:,.0f} times its median ({typical:.3g}): lower "
            "the learning rate, or clip gradients (<code>clip_grad_norm_</code>)."
        )
    if not onset.loss:
        return (
            f"The loss of that step was finite ({onset.loss_here:.4g}), so the backward made it: look for a log, a "
            "root or a division of zero before that layer. In half precision <code>GradScaler</code> leaves such steps "
            "out, and a few are normal."
        )
    # Gradients that are not finite spoil the parameters, and the next loss shows it.
    norm = onset.gradient_norm_before
    seen = onset.kind == "evaluation" or (norm is not None and norm.step == onset.number - 1)
    batches = f"batch of {onset.kind}" if seen else f"batches of steps {onset.number - 1:,} and"
    return (
        f"The loss before was usual for this run, so check the {batches} {onset.number:,} first "
        "(<code>torch.isfinite(batch).all()</code>, labels out of range). If it is sound, "
        "<code>torch.autograd.set_detect_anomaly(True)</code> names the operation."
    )


def _failed(content: Content) -> Iterator[Advice]:
    summary = content.summary
    end = ending(summary, content.info)
    failure = end or summary.first_failure
    if failure is None:
        return
    if end is not None:
        title = f"The run ended with {cut(failure.type)} {failure.place}"
    else:
        title = f"{count(sum(summary.errors.values()), 'failure')}, the first {failure.place}"
    words = []
    if failure.path:
        words.append(f"It was raised in <code>{shown(failure.path)}</code>.")
    elif failure.kind != "data":
        words.append("No module's call raised it.")
    if failure.message:
        words.append(f"The message: <code>{shown(failure.message, 300)}</code>.")
    if failure.kind == "step" and failure.last_step is not None:
        words.append(f"The last whole step before it is step {failure.last_step:,}.")
    if sum(summary.errors.values()) > 1:
        kinds = ", ".join(f"{steps:,} {shown(kind)}" for kind, steps in list(summary.errors.items())[:5])
        words.append(f"Failures in all: {kinds}.")
    yield Advice(3, title, " ".join(words))


def _unfinished(content: Content) -> Iterator[Advice]:
    if content.info.get("finished") is False:
        yield Advice(
            BROKEN,
            "The run has not ended",
            "It still goes on, or was cut short: this page shows what was written so far.",
        )


def _waiting(content: Content) -> Iterator[Advice]:
    share = phase_shares(usual(content))["data"]
    if share > DATA_SHARE:
        yield Advice(
            share,
            f"Waiting for data takes {percent(share)} of the time",
            "The model idles meanwhile. Give the DataLoader more <code>num_workers</code> (with "
            "<code>persistent_workers=True</code>), and on a GPU <code>pin_memory=True</code>; then look at what "
            "<code>__getitem__</code> does: decoding and augmentation can be done once, or on the device.",
        )


def _optimizer(content: Content) -> Iterator[Advice]:
    share = phase_shares(usual(content))["optimizer"]
    if share > OPTIMIZER_SHARE:
        yield Advice(
            share / 2,
            f"The optimizer takes {percent(share)} of the time",
            "Try <code>fused=True</code> (or <code>foreach=True</code>), and larger batches or gradient accumulation: "
            "its cost is by step, not by sample.",
        )


def _between(content: Content) -> Iterator[Advice]:
    share = phase_shares(usual(content))["between"]
    if share > BETWEEN_SHARE:
        yield Advice(
            share,
            f"{percent(share)} of the time passes between steps",
            "It is spent after the optimizer's step and before the next batch: a loader that is not a DataLoader, "
            "reading a loss with <code>.item()</code>, printing, metrics, checkpoints, and what a validation does "
            "beside its forwards. Load the next batch in the background, and do the rest every n-th step.",
        )


def _other(content: Content) -> Iterator[Advice]:
    share = phase_shares(usual(content))["other"]
    if share > OTHER_SHARE:
        yield Advice(
            share,
            f"{percent(share)} of the time is in no phase",
            "It is spent inside the step, between the fetch, the forward, the backward and the optimizer: copying the "
            "batch to a device, clipping gradients, reading values with <code>.item()</code>.",
        )


def _layers(content: Content) -> Iterator[Advice]:
    shares = phase_shares(usual(content))
    for direction, layers in (("forward", content.summary.forward), ("backward", content.summary.backward)):
        # One slow call, usually the first, says nothing about the others.
        if len(layers) <= 2:  # noqa: PLR2004  # of two layers one is always the larger
            continue
        layer = max(layers, key=_without_hooks_s)
        share = _without_hooks_s(layer) / _phase_s(content.summary, direction, layers)
        if share > LAYER_SHARE and layer.longest_s < layer.total_s / 2 and share * shares[direction] > WORTHWHILE:
            yield _dominating(direction, layers, layer, share=share, weight=share * shares[direction] / 2)


def _without_hooks_s(layer: LayerTime) -> float:
    """Return the layer's self time without the time that torchotel's hooks may take of it."""
    return max(0.0, layer.self_s - HOOKS_S * layer.inner_calls)


def _phase_s(summary: Summary, direction: str, layers: Sequence[LayerTime]) -> float:
    """Return the time of a phase in the steps that the layers are of; calls that are recomputed are in the backward."""
    phase_s = sum(step.forward_s if direction == "forward" else step.backward_s for step in summary.module_steps)
    return max(phase_s, sum(layer.self_s for layer in layers)) or 1.0


def _outside(content: Content) -> Iterator[Advice]:
    steps = content.summary.module_steps
    if not steps:
        return
    outside_s = median(step.forward_s - step.outermost_s - OUTERMOST_HOOKS_S * step.outermost_calls for step in steps)
    share = outside_s / (median(step.forward_s for step in steps) or 1.0)
    weight = share * phase_shares(usual(content))["forward"]
    if share > OUTSIDE_SHARE and weight > WORTHWHILE:
        yield Advice(
            weight / 2,
            f"{percent(share)} of the forward is outside of modules",
            f"{duration(outside_s)} of a step pass between the start of the model's forward and the backward, but in "
            "no module: the loss and other functions, such as <code>zero_grad</code> or reading values. A loss that "
            "is a module (<code>nn.Module</code>) has its own time here.",
        )


def _dominating(
    direction: str, layers: Sequence[LayerTime], layer: LayerTime, *, share: float, weight: float
) -> Advice:
    name = shown(layer.name(several=has_several_models(layers)))
    return Advice(
        weight,
        f"One module takes {percent(share)} of the {direction}",
        f"<code>{name}</code> ({shown(layer.type)}): {duration(layer.self_s)} of its own in "
        f"{count(layer.calls, 'call')}. {_remedy(layer.type, container=_is_container(layer, layers))}",
    )


def _is_container(layer: LayerTime, layers: Sequence[LayerTime]) -> bool:
    return any(
        other.model == layer.model and other is not layer and (layer.is_root or other.path.startswith(f"{layer.path}."))
        for other in layers
    )


def _remedy(kind: str, *, container: bool) -> str:
    """Say what can be done for a module of a class."""
    if container:
        return "It is time of its own code, outside of the modules in it: functions, loops, copies."
    if kind.endswith("Loss"):
        return "Its time grows with the outputs that it compares."
    if kind in {"Conv2d", "Conv3d", "ConvTranspose2d", "ConvTranspose3d"}:
        layout = "channels_last" if "2d" in kind else "channels_last_3d"
        return f"Try the memory format <code>{layout}</code>, or a lower precision (<code>torch.autocast</code>)."
    if kind in {"Linear", "Bilinear", "LSTM", "GRU", "MultiheadAttention"} or kind.startswith("Conv"):
        return "Matrix products take this time: try a lower precision (<code>torch.autocast</code>)."
    return "Start there."


def _outliers(content: Content) -> Iterator[Advice]:
    steps = later(content)
    if len(steps) < WARM_UP_STEPS:
        return
    median_s = median(step.duration_s for step in steps)
    slow = [step for step in steps if step.duration_s > SLOW_RATIO * median_s]
    if not slow:
        return
    usual_s = [median(step.phases_s[place] for step in steps) for place in range(len(PHASES))]
    lost_s = sum(step.duration_s - median_s for step in slow)
    worst = max(slow, key=lambda step: step.duration_s)
    words = f"The slowest is step {worst.number:,} with {duration(worst.duration_s)}, {_excess([worst], usual_s)}."
    if len(slow) > 1:
        words = f"Together they cost {duration(lost_s)} beyond it, {_excess(slow, usual_s)}. {words}"
    yield Advice(
        lost_s / (sum(step.duration_s for step in steps) or 1.0),
        f"{count(len(slow), 'step')} took more than {SLOW_RATIO:g} times the median",
        f"{words} {_recorded(content, worst.number)}",
    )


def _excess(slow: Sequence[StepTime], usual_s: Sequence[float]) -> str:
    """Name the phase that takes most of the time beyond the usual."""
    excess_s = [sum(step.phases_s[place] - usual_s[place] for step in slow) for place in range(len(PHASES))]
    place = max(range(len(PHASES)), key=excess_s.__getitem__)
    return f"{duration(excess_s[place])} of that in <b>{PHASES[place]}</b> beyond what is usual"


def _recorded(content: Content, number: int) -> str:
    """Say what the run file has of a step."""
    step = next((step for _, step in content.traces.chosen() if step.number == number), None)
    if step is None:
        return f"Its spans are not in the run file. {HAVE_MODULES}"
    if step.detailed:
        return 'Its modules are in <a href="#timeline">the timeline</a>.'
    return f'Its phases are in <a href="#timeline">the timeline</a>; its modules were not recorded. {HAVE_MODULES}'


def _drift(content: Content) -> Iterator[Advice]:
    steps = later(content)
    quarter = len(steps) // 4
    if quarter < WARM_UP_STEPS:
        return
    before_s = median(step.duration_s for step in steps[:quarter])
    after_s = median(step.duration_s for step in steps[-quarter:])
    if before_s and after_s / before_s > 1 + DRIFT:
        share = after_s / before_s - 1
        yield Advice(
            share / 2,
            f"Steps became {percent(share)} slower over the run",
            f"The median went from {duration(before_s)} in the first quarter to {duration(after_s)} in the last. "
            "Something grows (a list of losses with their graphs, a cache, the length of sequences), or the "
            "machine throttles.",
        )


def _gradients(content: Content) -> Iterator[Advice]:
    norms = {}
    for name, row in content.series.norms.items():
        finite = [norm for norm in row if math.isfinite(norm)]
        if finite:
            norms[name] = median(finite)
    largest = max(norms.values(), default=0.0)
    faint = {name: norm for name, norm in norms.items() if norm < VANISHING * largest}
    if faint:
        name, norm = min(faint.items(), key=lambda item: item[1])
        zero = sum(norm == 0 for norm in faint.values())
        yield Advice(
            0.3,
            f"Gradients vanish in {count(len(faint), 'layer')}",
            f"Their norm is less than {VANISHING:g} of the largest layer's: <code>{shown(name)}</code> has {norm:.2g} "
            f"beside {largest:.2g}"
            + (f", and {count(zero, 'layer')} get none at all" if zero else "")
            + ". Look for saturated "
            "activations, a detached branch, missing normalisation or residual connections, or half precision "
            "without scaling.",
        )


def _spikes(content: Content) -> Iterator[Advice]:
    numbers, values = content.series.logged.get("gradient norm", ((), ()))
    if len(values) < WARM_UP_STEPS:
        return
    typical, largest = median(values), max(values)
    if typical and largest > SPIKE * typical:
        yield Advice(
            0.25,
            f"The gradient norm jumped to {largest / typical:,.0f} times its median",
            f"{largest:.3g} at step {numbers[values.index(largest)]:,}, beside {typical:.3g}. Clip gradients, warm the "
            "learning rate up, or look at the batch of that step.",
        )


def _detail(content: Content) -> Iterator[Advice]:
    summary = content.summary
    if summary.steps and summary.detailed_steps < min(FEW_DETAILED, summary.steps):
        yield Advice(
            0,
            f"Only {count(summary.detailed_steps, 'step')} recorded in detail",
            "Times by module rest on these alone. Record more: <code>torchotel run --detail 8 …</code>, or "
            "<code>handle.detail(steps=5)</code> where it matters.",
        )
    deleted = (content.info.get("recording") or {}).get("spans_deleted", 0)
    if isinstance(deleted, int) and deleted:
        yield Advice(
            -1,
            "The oldest detail is gone",
            f"{count(deleted, 'span')} were deleted so that the run file keeps its size: times by module and the "
            "timeline are of the later steps. Times by phase and norms are whole.",
        )


_RULES: Sequence[Callable[[Content], Iterator[Advice]]] = (
    _nonfinite,
    _failed,
    _unfinished,
    _waiting,
    _between,
    _other,
    _outliers,
    _layers,
    _outside,
    _optimizer,
    _drift,
    _gradients,
    _spikes,
    _detail,
)
