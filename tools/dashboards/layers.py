"""What each layer does: its time forward and backward, and the norms of its gradients."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from tools.dashboards.frame import GPU, chosen, framed
from tools.dashboards.panels import WHOLE, Column, lines, listed, rows
from tools.dashboards.queries import (
    Query,
    against_median,
    by_run,
    grown,
    latest,
    least,
    least_at_end,
    most,
    most_at_end,
    rate,
    ratio,
    series,
)

UID = "torchotel-layers"
_CHOSEN = 'torch_module_path=~"$module"'
_LAYER = ("torch_model", "torch_module_path")
_NAME = "{{torch_module_path}} {{torch_model}} {{torch_run_id}}"
_CALL = (*_LAYER, "torch_module_type", "torch_direction")
_NORM = series("torch_module_gradient_norm", _CHOSEN)
_NORMS = by_run("max", _NORM, *_LAYER)
_LAST_NORMS = latest("max", _NORM, *_LAYER)
_AGAINST_MEDIAN = against_median("max", _NORM, *_LAYER)


def layers() -> Dashboard:
    """Make the dashboard that a link from a module's span leads to."""
    names = f"label_values({series('torch_module_calls_total')}, torch_module_path)"
    return framed(
        UID,
        "Layers",
        "What each layer does: its time forward and backward, and whether its gradients vanish or explode.",
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
        "Time of a call, of the fifteen layers where it is longest. A layer's time includes that of the layers "
        "inside it. Seen on steps in detail, so sparse where those are; on a GPU it is the host's time.",
        Query(_time_of_call("forward"), _NAME),
        sparse=True,
        many=True,
    ),
    lines(
        "Backward by layer",
        "s",
        "Time of the gradients through a call, of the fifteen layers where it is longest.",
        Query(_time_of_call("backward"), _NAME),
        sparse=True,
        many=True,
    ),
    listed(
        "Slowest layers",
        "On which layers the time went in the range shown, over all chosen ranks and steps in detail. A layer's time "
        "includes that of the layers inside it: the root stands on top, and the first leaf is the one to look at.",
        *_slowest(),
        width=WHOLE,
    ),
]
_GRADIENTS = [
    rows(
        "Gradient norms by layer: $run",
        "short",
        "The norm of each layer's gradients as a power of ten: -3 is 0.001. Colours go from dark blue, 10⁻⁶ and less, "
        "over green to dark red, 10³ and more: layers that turn blue have vanishing gradients, layers that turn red "
        "exploding ones. From the top, rows are in the order of their names as text: layers.10 before layers.2. At "
        "most the sixty layers with the largest norms at the end; a norm of 0 is left out.",
        Query(most_at_end(60, f"log10({_NORMS} > 0)"), "{{torch_module_path}} {{torch_model}}"),
        low=-6,
        high=3,
    ),
    listed(
        "Exploding layers",
        "Layers whose gradients have grown most: the last norm against its median in the range shown.",
        Column("times the median", "short", most(15, _AGAINST_MEDIAN)),
        Column("norm", "sci", f"{_LAST_NORMS} and {most(15, _AGAINST_MEDIAN)}"),
        width=WHOLE,
    ),
    listed(
        "Vanishing layers",
        "Layers whose gradients have shrunk most: the last norm against its median in the range shown.",
        Column("times the median", "short", least(15, _AGAINST_MEDIAN)),
        Column("norm", "sci", f"{_LAST_NORMS} and {least(15, _AGAINST_MEDIAN)}"),
        width=WHOLE,
        ascending=True,
    ),
    lines(
        "Largest gradient norms",
        "sci",
        "L2 over the layer's own parameters, before clipping and unscaled, the ten largest.",
        Query(most_at_end(10, _NORMS), _NAME),
        log=True,
        many=True,
    ),
    lines(
        "Smallest gradient norms",
        "sci",
        "The ten smallest. A norm of 0 can't be drawn on a logarithmic axis: the table of vanishing layers has it.",
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
        "Time of a call on the device's own clock, forward and backward, of the fifteen layers where it is longest.",
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
