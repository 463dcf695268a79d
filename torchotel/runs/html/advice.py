"""Derive advice from the numbers of a run; pure functions."""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from torchotel._records import PHASES
from torchotel.runs.compare import WARM_UP_STEPS
from torchotel.runs.html.data import Content, StepTime
from torchotel.runs.html.style import count, cut, duration, escaped, percent, sentence
from torchotel.runs.summary import LayerTime, Summary, has_several_models, run_failure
from torchotel.runs.value_ranges import Onset

DATA_SHARE = 0.1
OPTIMIZER_SHARE = 0.2
BETWEEN_SHARE = OTHER_SHARE = 0.15
LAYER_SHARE = 0.3
MIN_LAYERS = 3
"""Layers below which no layer is named: of two layers, one always takes more than half."""
HOOKS_S = 20e-6
"""Seconds of torchotel's hooks in a module's self time, for each module call inside it (6 to 17 µs were measured)."""
ROOT_CALL_HOOKS_S = 100e-6
"""Seconds of torchotel's hooks around a root call, in the forward phase (50 to 100 µs were measured)."""
OUTSIDE_SHARE = 0.5
OUTLIERS = 20
"""One step of this number, the slowest, is left out of the advice on phases."""
SLOW_RATIO = 2.0
"""Factor of the median time above which a step is an outlier."""
WORTHWHILE = 0.1
"""Share of the steps' time below which a change is not worth advice."""
WORTHWHILE_WAIT_S = 1e-3
"""Seconds of waiting for a batch below which a worker of a DataLoader costs more than it saves."""
DRIFT = 0.15
VANISHING = 1e-4
"""Share of the largest layer's norm below which a gradient counts as vanishing."""
SPIKE = 20.0
"""Factor of the median norm above which a norm counts as a spike."""
FEW_DETAILED = 5
GROWN = 5.0
"""Factor of the median loss above which the loss counts as diverging."""
BROKEN = 2
"""Smallest weight of advice on failures; advice on speed weighs less."""

HAVE_MODULES = "With <code>torchotel run --detail all</code> every step has its modules."
_LOSS = "loss"
_MIN_STEPS = 20
"""Steps below which the warm-up is not left out, since too few steps would remain."""


class Advice(NamedTuple):
    """A remarkable property of the run, with a remedy."""

    weight: float
    """Sort key, largest first: BROKEN or more for failures, else the share of time that the advice could save."""
    title: str
    """Plain text, which the template escapes."""
    text: str
    """HTML: names from the run are already escaped."""


def advise(content: Content) -> Sequence[Advice]:
    """Return the advice on a run, the most important first."""
    advice_items = [advice for rule in _RULES for advice in rule(content)]
    return sorted(advice_items, key=lambda advice: -advice.weight)


def after_warm_up(content: Content) -> Sequence[StepTime]:
    """Return the steps after the warm-up, or all steps of a short run."""
    steps = content.series.steps
    return steps[WARM_UP_STEPS:] if len(steps) >= _MIN_STEPS else steps


def typical_steps(content: Content) -> Sequence[StepTime]:
    """Return the steps after the warm-up without the slowest ones, which have advice of their own.

    All shares of phases on the page are of these steps. Medians of phases would hide waits in every n-th step, as with
    several workers of a DataLoader.
    """
    steps = after_warm_up(content)
    slowest = max(1, len(steps) // OUTLIERS) if len(steps) >= WARM_UP_STEPS else 0
    return sorted(steps, key=lambda step: step.duration_s)[: len(steps) - slowest]


def phase_shares(steps: Sequence[StepTime]) -> dict[str, float]:
    """Return each phase's share of the steps' time."""
    whole_s = sum(step.duration_s for step in steps) or 1.0
    return {name: sum(step.phases_s[index] for step in steps) / whole_s for index, name in enumerate(PHASES)}


def _nonfinite(content: Content) -> Iterator[Advice]:
    onset = content.summary.value_ranges.onset
    if onset is None:
        return
    sentences = ["The loss was NaN or infinite." if onset.loss else "A gradient was NaN or infinite."]
    if onset.layers:
        sentences.append(_nonfinite_layers(onset))
    elif onset.finite_norm_steps:
        sentences.append(f"The gradient norms read from then on ({count(onset.finite_norm_steps, 'step')}) are finite.")
    elif content.info.get("finished") is not False:
        sentences.append("No gradient norm was recorded after it: <code>gradient_norms=True</code> names the layers.")
    before = [("loss", onset.loss_before), ("norm of all gradients", onset.gradient_norm_before)]
    values = " and ".join(f"a {name} of {at}" for name, at in before if at is not None)
    if values:
        sentences.append(f"The last finite values before: {values}.")
    sentences.append(_cause(content, onset))
    if any(math.isinf(norm) for row in content.series.norms.values() for norm in row):
        sentences.append('Red cells in the <a href="#norms">gradient norms by layer</a> are such gradients.')
    # Without a logged loss, NaN is seen on steps with gradient norms only.
    verb = "began" if onset.loss or onset.loss_here is not None else "was first seen"
    yield Advice(4, f"NaN or infinity {verb} at {onset.place}", " ".join(sentences))


def _nonfinite_values(content: Content) -> Iterator[Advice]:
    counts = content.summary.value_ranges.nonfinite_values
    if not counts:
        return
    (name, steps), *others = counts.items()
    more = f" So were {', '.join(escaped(cut(other)) for other, _ in others)}." if others else ""
    yield Advice(
        BROKEN,
        f"{cut(name)} was NaN or infinite {count(steps, 'time')}",
        f"The program logs this value: check how it is computed.{more}",
    )


def _nonfinite_layers(onset: Onset) -> str:
    """Return the layers as a sentence. If the gradients are of a later step, NaN has spread to layers meanwhile."""
    layers = f"<b>{escaped(onset.first_layers(), 300)}</b>"
    if onset.layers_step == onset.number:
        return f"The first layers: {layers}."
    return f"Layers with such gradients at step {onset.layers_step:,}: {layers}."


def _cause(content: Content, onset: Onset) -> str:
    """Return the probable cause of NaN as HTML: a growing loss, the backward, or the batch."""
    if not onset.loss and onset.loss_here is None:
        checked = (
            content.summary.value_ranges.partly_checked(content.summary.steps) or "The loss of that step was not logged"
        )
        return (
            f"{checked}; it may have begun on an earlier step, in the batch, the loss or the backward. Log the loss "
            "with <code>torchotel.log(loss=loss)</code> to see the step."
        )
    if onset.loss and onset.loss_before is None:
        return "No loss before it was finite: check the inputs, the labels and the initial parameters."
    numbers, losses = content.series.logged.get(_LOSS, ((), ()))
    last_step = -1 if onset.last_step is None else onset.last_step
    before = [loss for number, loss in zip(numbers, losses, strict=True) if number <= last_step]
    typical = median(before) if before else math.inf
    last = onset.loss_here if onset.loss_here is not None else onset.loss_before.value if onset.loss_before else 0.0
    if last > GROWN * typical > 0:  # a negative loss that falls is progress
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
    # Gradients that are not finite make the parameters NaN in the optimizer's step, and then the next loss.
    norm = onset.gradient_norm_before
    seen = onset.kind == "evaluation" or (norm is not None and norm.step == onset.number - 1)
    batches = f"batch of {onset.place}" if seen else f"batches of steps {onset.number - 1:,} and {onset.number:,}"
    unseen = (
        f" The gradients of step {onset.number - 1:,} were not read, so its backward or its update may be the cause: "
        "<code>gradient_norms=True</code> names the step and the layers."
    )
    return (
        f"The loss before was usual for this run.{'' if seen else unseen} Check the {batches} first "
        "(<code>torch.isfinite(batch).all()</code>, labels out of range). If it is sound, "
        "<code>torch.autograd.set_detect_anomaly(True)</code> names the operation."
    )


def _failed(content: Content) -> Iterator[Advice]:
    summary = content.summary
    end = run_failure(summary, content.info)
    failure = end or summary.first_failure
    if failure is None:
        return
    if end is not None:
        title = f"The run ended with {cut(failure.type)} {failure.place}"
    else:
        title = f"{count(sum(summary.errors.values()), 'failure')}, the first {failure.place}"
    sentences = []
    if failure.path:
        sentences.append(f"It was raised in <code>{escaped(failure.path)}</code>.")
    elif failure.kind != "data":
        sentences.append("No module's call raised it.")
    if failure.message:
        sentences.append(f"The message: <code>{escaped(failure.message, 300)}</code>.")
    if failure.kind == "step" and failure.last_step is not None:
        sentences.append(f"The last whole step before it is step {failure.last_step:,}.")
    if sum(summary.errors.values()) > 1:
        counts = ", ".join(f"{steps:,} {escaped(kind)}" for kind, steps in list(summary.errors.items())[:5])
        sentences.append(f"Failures in all: {counts}.")
    yield Advice(3, title, " ".join(sentences))


def _stalled(content: Content) -> Iterator[Advice]:
    stall = content.summary.last_stall
    if stall is not None:
        place = f" It waited at <code>{escaped(stall.message, 500)}</code>." if stall.message else ""
        yield Advice(BROKEN, f"The training stalled {stall.place}", f"A phase was open, and nothing happened.{place}")


def _unfinished(content: Content) -> Iterator[Advice]:
    if content.info.get("finished") is False and run_failure(content.summary, content.info) is None:
        yield Advice(
            BROKEN,
            "The run has not ended",
            "It still goes on, or was cut short: this page shows what was written so far.",
        )


def _waiting(content: Content) -> Iterator[Advice]:
    steps = typical_steps(content)
    share = phase_shares(steps)["data"]
    if share > DATA_SHARE and share * sum(step.duration_s for step in steps) / len(steps) > WORTHWHILE_WAIT_S:
        yield Advice(
            share,
            f"Waiting for data takes {percent(share)} of the time",
            "The model idles meanwhile. Give the DataLoader more <code>num_workers</code> (with "
            "<code>persistent_workers=True</code>), and on a GPU <code>pin_memory=True</code>; then look at what "
            "<code>__getitem__</code> does: decoding and augmentation can be done once, or on the device.",
        )


def _optimizer(content: Content) -> Iterator[Advice]:
    share = phase_shares(typical_steps(content))["optimizer"]
    if share > OPTIMIZER_SHARE:
        yield Advice(
            share / 2,
            f"The optimizer takes {percent(share)} of the time",
            "Try <code>fused=True</code> (or <code>foreach=True</code>), and larger batches or gradient accumulation: "
            "its cost is by step, not by sample.",
        )


def _between(content: Content) -> Iterator[Advice]:
    share = phase_shares(typical_steps(content))["between"]
    if share > BETWEEN_SHARE:
        yield Advice(
            share,
            f"{percent(share)} of the time passes between steps",
            "It is spent after the optimizer's step and before the next batch: a loader that is not a DataLoader, "
            "reading a loss with <code>.item()</code>, printing, metrics, checkpoints, and what a validation does "
            "beside its forwards. Load the next batch in the background, and do the rest every n-th step.",
        )


def _other(content: Content) -> Iterator[Advice]:
    share = phase_shares(typical_steps(content))["other"]
    if share > OTHER_SHARE:
        yield Advice(
            share,
            f"{percent(share)} of the time is in no phase",
            "It is spent inside the step, between the fetch, the forward, the backward and the optimizer: copying the "
            "batch to a device, clipping gradients, reading values with <code>.item()</code>.",
        )


def _layers(content: Content) -> Iterator[Advice]:
    shares = phase_shares(typical_steps(content))
    for direction, layers in (("forward", content.summary.forward), ("backward", content.summary.backward)):
        # A single slow call, usually the first, does not represent the others.
        usual = [layer for layer in layers if layer.longest_s < layer.total_s / 2]
        slow_s = [layer.longest_s for layer in layers if layer.longest_s >= layer.total_s / 2]
        if len(layers) < MIN_LAYERS or not usual:
            continue
        layer = max(usual, key=_without_hooks_s)
        # Slow calls contain each other, so only the longest is subtracted.
        phase_s = _phase_s(content.summary, direction, layers) - max(slow_s, default=0.0)
        share = _without_hooks_s(layer) / max(phase_s, layer.self_s)
        if share > LAYER_SHARE and share * shares[direction] > WORTHWHILE:
            yield _dominating(direction, layers, layer, share=share, weight=share * shares[direction] / 2)


def _without_hooks_s(layer: LayerTime) -> float:
    """Return the layer's self time in seconds, less the possible share of torchotel's hooks."""
    return max(0.0, layer.self_s - HOOKS_S * layer.inner_calls)


def _phase_s(summary: Summary, direction: str, layers: Sequence[LayerTime]) -> float:
    """Return the seconds of a phase in the layers' steps. Recomputed calls count in the backward phase."""
    phase_s = sum(step.forward_s if direction == "forward" else step.backward_s for step in summary.module_steps)
    return max(phase_s, sum(layer.self_s for layer in layers)) or 1.0


def _outside(content: Content) -> Iterator[Advice]:
    typical = {step.number for step in after_warm_up(content)}
    steps = [step for step in content.summary.module_steps if step.number in typical]
    if not steps:
        return
    outside_s = median(step.forward_s - step.root_calls_s - ROOT_CALL_HOOKS_S * step.root_calls for step in steps)
    share = outside_s / (median(step.forward_s for step in steps) or 1.0)
    weight = share * phase_shares(typical_steps(content))["forward"]
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
    name = escaped(layer.name(several=has_several_models(layers)))
    return Advice(
        weight,
        f"One module takes {percent(share)} of the {direction} phase",
        f"<code>{name}</code> ({escaped(layer.type)}): {duration(layer.self_s)} of its own in "
        f"{count(layer.calls, 'call')}. {_remedy(layer.type, container=_is_container(layer, layers))}",
    )


def _is_container(layer: LayerTime, layers: Sequence[LayerTime]) -> bool:
    return any(
        other.model == layer.model and other is not layer and (layer.is_root or other.path.startswith(f"{layer.path}."))
        for other in layers
    )


def _remedy(kind: str, *, container: bool) -> str:
    """Return the advice for a slow module of a class."""
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
    steps = after_warm_up(content)
    if len(steps) < WARM_UP_STEPS:
        return
    median_s = median(step.duration_s for step in steps)
    slow = [step for step in steps if step.duration_s > SLOW_RATIO * median_s]
    if not slow:
        return
    usual_s = [median(step.phases_s[index] for step in steps) for index in range(len(PHASES))]
    lost_s = sum(step.duration_s - median_s for step in slow)
    worst = max(slow, key=lambda step: step.duration_s)
    sentences = f"The slowest is step {worst.number:,} with {duration(worst.duration_s)}, {_excess([worst], usual_s)}."
    if len(slow) > 1:
        sentences = f"Together they cost {duration(lost_s)} beyond it, {_excess(slow, usual_s)}. {sentences}"
    yield Advice(
        lost_s / (sum(step.duration_s for step in steps) or 1.0),
        f"{count(len(slow), 'step')} took more than {SLOW_RATIO:g} times the median",
        f"{sentences} {_recorded(content, worst.number)}",
    )


def _excess(slow: Sequence[StepTime], usual_s: Sequence[float]) -> str:
    """Return the phase with most of the time beyond the usual, as HTML."""
    excess_s = [sum(step.phases_s[index] - usual_s[index] for step in slow) for index in range(len(PHASES))]
    index = max(range(len(PHASES)), key=excess_s.__getitem__)
    return f"{duration(excess_s[index])} of that in <b>{PHASES[index]}</b> beyond what is usual"


def _recorded(content: Content, number: int) -> str:
    """Return whether the run file has a step's modules, as HTML."""
    step = next((step for _, step in content.traces.selected() if step.number == number), None)
    if step is None:
        return f"Its spans are not in the run file. {HAVE_MODULES}"
    if step.detailed:
        return 'Its modules are in <a href="#timeline">the timeline</a>.'
    return f'Its phases are in <a href="#timeline">the timeline</a>; its modules were not recorded. {HAVE_MODULES}'


def _drift(content: Content) -> Iterator[Advice]:
    steps = after_warm_up(content)
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
            f"Their norm is less than {VANISHING:g} of the largest layer's: <code>{escaped(name)}</code> has "
            f"{norm:.2g}, the largest {largest:.2g}"
            + (f", and {count(zero, 'layer')} get none" if zero else "")
            + ". Look for saturated activations, a detached branch, missing normalisation or "
            "residual connections, or half precision without scaling.",
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
            "<code>handle.detail(steps=5)</code> for the steps that matter.",
        )
    deleted = (content.info.get("recording") or {}).get("spans_deleted", 0)
    if isinstance(deleted, int) and deleted:
        yield Advice(
            -1,
            "The oldest detail is gone",
            f"{count(deleted, 'span')} were deleted so that the run file keeps its size: times by module and the "
            "timeline are of the later steps. Times by phase and norms are whole.",
        )


_REMEDIES = {
    "data": "Look at the store and the cores of that host, and at the size of the rank's share of the data.",
    "between": "Look at the rank's part of the program between two steps: logging, checkpoints, a loader of its own.",
    "optimizer": "Compare what the rank's optimizer updates with the other ranks.",
}
_OTHER_REMEDY = (
    "Compare the rank's inputs (sequence lengths, experts) and its share of the model with the other ranks, and look "
    "for another program, heat or a lower clock on its host and device."
)


def _slow_rank(content: Content) -> Iterator[Advice]:
    slow = content.ranks.slow if content.ranks else None
    if slow is not None:
        remedy = _REMEDIES.get(slow.phase, _OTHER_REMEDY)
        yield Advice(
            slow.share, f"The other ranks wait for rank {slow.rank}", f"{escaped(sentence(str(slow)), 300)}. {remedy}"
        )


_RULES: Sequence[Callable[[Content], Iterator[Advice]]] = (
    _nonfinite,
    _nonfinite_values,
    _failed,
    _stalled,
    _unfinished,
    _slow_rank,
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
