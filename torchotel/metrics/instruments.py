"""The table of all metrics, for every exporter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchotel import _semconv as names

STEP_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)
MODULE_BOUNDS_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)
_SUFFIXES = {"s": "seconds", "By": "bytes", "1": "ratio"}
_COLLECTIVE = (names.COLLECTIVE_OPERATION, names.COLLECTIVE_GROUP)
_MODULE = (names.MODEL, names.MODULE_PATH, names.MODULE_TYPE, names.DIRECTION)


@dataclass(frozen=True, slots=True, eq=False)
class Instrument:
    """One metric. Compared by identity."""

    name: str
    """Name in OpenTelemetry."""
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    """UCUM unit; empty for a plain number."""
    labels: tuple[str, ...]
    description: str
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without the infinite one."""

    @property
    def prometheus_unit(self) -> str:
        """Return the unit's name in Prometheus; empty for an annotation like {step}."""
        return _SUFFIXES.get(self.unit, "")

    @property
    def prometheus_name(self) -> str:
        """Return the name of the metric family in Prometheus; a counter's samples add `_total`."""
        name, unit = self.name.replace(".", "_"), self.prometheus_unit
        return name if not unit or name.endswith(f"_{unit}") else f"{name}_{unit}"


STEP_DURATION = Instrument(
    names.METRIC_STEP_DURATION, "histogram", "s", (), "Duration of training steps.", STEP_BOUNDS_S
)
PHASE_TIME = Instrument(
    names.METRIC_PHASE_TIME, "counter", "s", (names.PHASE,), "Self time of the phases of training steps."
)
MODULE_TIME = Instrument(names.METRIC_MODULE_TIME, "counter", "s", _MODULE, "Time of module calls in detailed steps.")
MODULE_CALLS = Instrument(names.METRIC_MODULE_CALLS, "counter", "{call}", _MODULE, "Module calls in detailed steps.")
MODULE_DURATION = Instrument(
    names.METRIC_MODULE_DURATION,
    "histogram",
    "s",
    _MODULE,
    "Duration of module calls in detailed steps.",
    MODULE_BOUNDS_S,
)
MODULE_DEVICE_TIME = Instrument(
    names.METRIC_MODULE_DEVICE_TIME, "counter", "s", _MODULE, "Time of module calls on the clock of their device."
)
MODULE_GRADIENT_NORM = Instrument(
    names.METRIC_MODULE_GRADIENT_NORM,
    "gauge",
    "",
    (names.MODEL, names.MODULE_PATH, names.GRADIENT_SCOPE),
    "L2 norm of the gradients of a module's own parameters, before clipping and unscaled; of this rank's shard if they "
    "are sharded.",
)
GRADIENT_NORM = Instrument(
    names.METRIC_GRADIENT_NORM,
    "gauge",
    "",
    (names.GRADIENT_SCOPE,),
    "L2 norm of all gradients, before clipping and unscaled; of this rank's shard if parameters are sharded.",
)
TENSOR_GRADIENT_NORM = Instrument(
    names.METRIC_TENSOR_GRADIENT_NORM, "gauge", "", (names.TENSOR_NAME,), "L2 norm of the gradient of a watched tensor."
)
STEP_NONFINITE = Instrument(
    names.METRIC_STEP_NONFINITE,
    "counter",
    "{step}",
    (names.NONFINITE_KIND,),
    "Steps with a NaN or infinite loss or gradient, of those that were checked.",
)
STEPS = Instrument(names.METRIC_STEPS, "counter", "{step}", (), "Training steps.")
SAMPLES = Instrument(names.METRIC_SAMPLES, "counter", "{sample}", (), "Samples, as logged.")
EVALUATIONS = Instrument(
    names.METRIC_EVALUATIONS, "counter", "{evaluation}", (), "Batches that were forwarded outside of training steps."
)
LOSS = Instrument(names.METRIC_LOSS, "gauge", "", (), "Loss, as logged.")
LEARNING_RATE = Instrument(
    names.METRIC_LEARNING_RATE, "gauge", "", (), "Learning rate, as logged or the first optimizer's."
)
STEP_LAST_END_TIME = Instrument(
    names.METRIC_STEP_LAST_END_TIME, "gauge", "s", (), "Unix time at which the last training step ended."
)
RUN_FINISHED = Instrument(
    names.METRIC_RUN_FINISHED,
    "gauge",
    "",
    (),
    "1 after a normal end of the run, also by `sys.exit(n)` in a plain script, else 0.",
)
RUN_STALLED = Instrument(
    names.METRIC_RUN_STALLED,
    "gauge",
    "",
    (),
    "1 while a phase is open and nothing happens, else 0; with a companion process.",
)
TOKENS = Instrument(names.METRIC_TOKENS, "counter", "{token}", (), "Tokens, as logged.")
LOG = Instrument(names.METRIC_LOG, "gauge", "", (names.LOG_NAME,), "Values logged under names of the program's own.")
EVALUATION_TIME = Instrument(names.METRIC_EVALUATION_TIME, "counter", "s", (), "Time of evaluations.")
MEMORY_ALLOCATED = Instrument(
    names.METRIC_MEMORY_ALLOCATED, "gauge", "By", (names.DEVICE,), "Device memory of tensors at the end of a step."
)
MEMORY_RESERVED = Instrument(
    names.METRIC_MEMORY_RESERVED, "gauge", "By", (names.DEVICE,), "Device memory of the allocator at the end of a step."
)
MEMORY_PEAK = Instrument(names.METRIC_MEMORY_PEAK, "gauge", "By", (names.DEVICE,), "Peak device memory of tensors.")
COLLECTIVE_TIME = Instrument(
    names.METRIC_COLLECTIVE_TIME, "counter", "s", _COLLECTIVE, "Time of collectives, until they are done or issued."
)
COLLECTIVE_WAIT = Instrument(
    names.METRIC_COLLECTIVE_WAIT,
    "counter",
    "s",
    _COLLECTIVE,
    "Time of collectives during which no earlier one ran. The rank that the others wait for has the least.",
)
COLLECTIVE_BYTES = Instrument(
    names.METRIC_COLLECTIVE_BYTES, "counter", "By", _COLLECTIVE, "Size of the tensors of collectives."
)
COLLECTIVE_CALLS = Instrument(names.METRIC_COLLECTIVE_CALLS, "counter", "{call}", _COLLECTIVE, "Collectives.")
COLLECTIVE_ENQUEUED = Instrument(
    names.METRIC_COLLECTIVE_ENQUEUED,
    "gauge",
    "",
    (names.COLLECTIVE_GROUP,),
    "Number of the last collective that the process group has enqueued; only while no step ends.",
)
COLLECTIVE_COMPLETED = Instrument(
    names.METRIC_COLLECTIVE_COMPLETED,
    "gauge",
    "",
    (names.COLLECTIVE_GROUP,),
    "Number of the last collective that the process group has completed; only while no step ends.",
)
SPANS = Instrument(names.METRIC_SPANS, "counter", "{span}", (names.OUTCOME,), "Spans by outcome.")
EXPORT_ERRORS = Instrument(
    names.METRIC_EXPORT_ERRORS, "counter", "{error}", (names.ERROR_TYPE,), "Failed attempts to export."
)
OVERHEAD_RATIO = Instrument(
    names.METRIC_OVERHEAD_RATIO,
    "gauge",
    "1",
    (),
    "Share of step time that detail costs.",
)
DETAIL_RATIO = Instrument(names.METRIC_DETAIL_RATIO, "gauge", "1", (), "Share of detailed steps among training steps.")

TABLE = tuple(value for value in list(globals().values()) if isinstance(value, Instrument))
"""All instruments, in the order of this file."""
