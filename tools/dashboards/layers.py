"""Time of each layer, forward and backward, and the norms of its gradients."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from tools.dashboards.frame import GPU, chosen, framed
from tools.dashboards.panels import WHOLE, Column, lines, listed, rows
from tools.dashboards.queries import (
    Query,
    at_end,
    by_run,
    gradient_norm,
    grown,
    least_at_end,
    median,
    most,
    most_at_end,
    or_nan,
    rate,
    ratio,
    series,
)

UID = "torchotel-layers"
_CHOSEN = 'torch_module_path=~"$module"'
_LAYER = ("torch_model", "torch_module_path")
_NAME = "{{torch_module_path}} {{torch_model}} {{torch_run_id}}"
_CALL = (*_LAYER, "torch_module_type", "torch_direction")
_FINITE_NORMS = gradient_norm("torch_module_gradient_norm", _CHOSEN, labels=_LAYER)
_NORMS = or_nan(_FINITE_NORMS)
_LAST_NORMS = at_end(_NORMS)
_AGAINST_MEDIAN = ratio(_LAST_NORMS, median(_FINITE_NORMS))
_GROWN, _FALLEN = 10, 0.1
"""Ratios of the last norm to its median from which a layer is exploding or vanishing."""
_EXPLODING = f"({_AGAINST_MEDIAN} unless {_AGAINST_MEDIAN} <= {_GROWN})"  # NaN is not <= 10, so it stays
_VANISHING = f"({_AGAINST_MEDIAN} < {_FALLEN})"


def layers() -> Dashboard:
    """Make the dashboard that is linked from a module's span."""
    names = f"label_values({series('torch_module_calls_total')}, torch_module_path)"
    return framed(
        UID,
        "Layers",
        "Time of each layer, forward and backward, with vanishing and exploding gradients.",
        {"Time": _TIME, "Gradients": _GRADIENTS, GPU: _GPU},
        chosen("module", names, "Layers, by their names in the model."),
    )


def _time_of_call(direction: str) -> str:
    matchers = _CHOSEN, f'torch_direction="{direction}"'
    times = by_run("sum", rate("torch_module_time_seconds_total", *matchers), *_LAYER)
    return most_at_end(15, ratio(times, by_run("sum", rate("torch_module_calls_total", *matchers), *_LAYER)))


def _slowest() -> list[Column]:
    times = grown("sum", series("torch_module_time_seconds_total", _CHOSEN), *_CALL)
    calls = grown("sum", series("torch_module_calls_total", _CHOSEN), *_CALL)
    slowest = most(30, times)
    return [
        Column("time", "s", slowest),
        Column("calls", "short", f"{calls} and {slowest}"),
        Column("time of a call", "s", f"{ratio(times, calls)} and {slowest}"),
    ]


_TIME = [
    lines(
        "Forward by layer",
        "s",
        "Time of a call, for the fifteen layers with the longest time. A layer's time includes that of the layers"
        " inside it. Only detailed steps have values. On a GPU this is the host's time.",
        Query(_time_of_call("forward"), _NAME),
        sparse=True,
        many=True,
    ),
    lines(
        "Backward by layer",
        "s",
        "Time of the backward through a call, for the fifteen layers with the longest time.",
        Query(_time_of_call("backward"), _NAME),
        sparse=True,
        many=True,
    ),
    listed(
        "Slowest layers",
        "Time by layer in the range shown, over all chosen ranks and detailed steps. A layer's time includes that of"
        " the layers inside it: the root is at the top, and the first leaf is the most expensive layer.",
        *_slowest(),
        width=WHOLE,
    ),
]
_GRADIENTS = [
    rows(
        "Gradient norms by layer: $run",
        "short",
        "Norm of each layer's gradients as a power of ten: -3 is 0.001. Dark blue is 10⁻⁶ and less, green is in"
        " between, dark red is 10³ and more. Layers that turn blue have vanishing gradients, layers that turn red"
        " exploding ones. Rows are sorted by name as text: layers.10 is before layers.2. At most sixty layers are"
        " shown, those with the largest norms at the end. A norm of 0, NaN or infinity is omitted.",
        Query(most_at_end(60, f"log10({_FINITE_NORMS} > 0)"), "{{torch_module_path}} {{torch_model}}"),
        low=-6,
        high=3,
    ),
    listed(
        "Exploding layers",
        "Layers whose last norm is more than 10 times its median in the range shown, or has become NaN or infinite:"
        " NaN.",
        Column("times the median", "short", _EXPLODING),
        Column("norm", "sci", f"{_LAST_NORMS} and {_EXPLODING}"),
        width=WHOLE,
        empty="No layer: each last norm is finite and at most 10 times its median.",
    ),
    listed(
        "Vanishing layers",
        "Layers whose last norm is less than a tenth of its median in the range shown.",
        Column("times the median", "short", _VANISHING),
        Column("norm", "sci", f"{_LAST_NORMS} and {_VANISHING}"),
        width=WHOLE,
        ascending=True,
        empty="No layer: no last norm is below a tenth of its median.",
    ),
    lines(
        "Largest gradient norms",
        "sci",
        "L2 norm over the layer's own parameters, before clipping and unscaled: the ten largest. The legend shows the"
        " last norm, and NaN for a norm that has become NaN or infinite.",
        Query(most_at_end(10, _NORMS), _NAME),
        log=True,
        many=True,
    ),
    lines(
        "Smallest gradient norms",
        "sci",
        "The ten smallest norms. A logarithmic axis cannot show a norm of 0: see the table of vanishing layers.",
        Query(least_at_end(10, _NORMS), _NAME),
        log=True,
        many=True,
    ),
    lines(
        "Watched tensors",
        "sci",
        "Norms of the gradients of intermediate tensors that the program watches with torchotel.watch.",
        Query(
            by_run("max", series("torch_tensor_gradient_norm"), "torch_tensor_name"),
            "{{torch_run_id}} {{torch_tensor_name}}",
        ),
        width=WHOLE,
        log=True,
    ),
]
_GPU = [
    lines(
        "GPU time by layer",
        "s",
        "Time of a call on the device's own clock, forward and backward, for the fifteen layers with the longest time.",
        Query(
            most_at_end(
                15,
                ratio(
                    by_run("sum", rate("torch_module_device_time_seconds_total", _CHOSEN), *_LAYER, "torch_direction"),
                    by_run("sum", rate("torch_module_calls_total", _CHOSEN), *_LAYER, "torch_direction"),
                ),
            ),
            f"{_NAME} {{{{torch_direction}}}}",
        ),
        width=WHOLE,
        sparse=True,
        many=True,
    ),
]
