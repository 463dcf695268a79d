"""Ranges of logged values and gradient norms over a run: first, last, smallest and largest; pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from torchotel._semconv import LOGGED_COUNTS, LOGGED_NAMES
from torchotel._utils.text import cut
from torchotel.runs.reader import RecordLine

MAX_SUMMED = 2**63
"""Largest value of one line: larger ones in a damaged file could add up to more than a float can hold."""


NOT_FINITE = "NaN or Inf"
"""Shown instead of a number: the run file writes null for NaN and for infinity."""

_LOSS, _ALL = "loss", "all parameters"
_GRADIENT = "gradient "
"""Prefix of a layer's path in `torch.nonfinite`."""
_SHOWN_LAYERS = 3

Key = TypeVar("Key")


class ValueRange(NamedTuple):
    """The range of a number over the steps that have it."""

    name: str
    steps: int
    """Steps in which the number was finite."""
    first: float
    last: float | None
    """None: the last value was NaN or infinite."""
    smallest: float
    largest: float


class LayerId(NamedTuple):
    """Model and path of a layer with gradient norms."""

    model: str
    path: str


def layer_names(layers: Iterable[LayerId]) -> Mapping[LayerId, str]:
    """Return display names: the path, with the model's name before it if the run has several models."""
    layer_ids = list(layers)
    several = len({layer.model for layer in layer_ids}) > 1
    return {layer: f"{layer.model}: {layer.path}" if several else layer.path for layer in layer_ids}


class StepValue(NamedTuple):
    """A number and the number of its step."""

    step: int
    value: float

    def __str__(self) -> str:
        return f"{self.value:.4g} at step {self.step:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Onset:
    """The first step with a loss or a gradient that is NaN or infinite, and the values before that step."""

    kind: str
    """step | evaluation."""
    number: int
    loss: bool
    """Whether the loss of this step was NaN or infinite."""
    loss_here: float | None
    """The loss of this step if it was finite."""
    loss_before: StepValue | None
    """The last finite loss of an earlier step."""
    gradient_norm_before: StepValue | None
    """The last finite norm of all gradients of an earlier step."""
    last_step: int | None = None
    """The last step before."""
    layers: Sequence[str] = ()
    """Paths of the first layers with NaN or infinite gradients, in backward order."""
    layers_step: int = 0
    """The step of `layers`: not every step has gradient norms."""
    finite_norm_steps: int = 0
    """Steps from this one on whose gradient norms were read and are finite."""

    @property
    def place(self) -> str:
        """Return the step, or the evaluation with the step before it."""
        after = f", after step {self.last_step:,}" if self.kind == "evaluation" and self.last_step is not None else ""
        return f"{self.kind} {self.number:,}{after}"

    def first_layers(self) -> str:
        """Return the first layers as one line; empty if no gradient was NaN or infinite."""
        names = ", ".join(cut(path) for path in self.layers[:_SHOWN_LAYERS])
        more = len(self.layers) - _SHOWN_LAYERS
        return names + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, kw_only=True)
class ValueRanges:
    """Value ranges of a run, and its first NaN."""

    totals: Mapping[str, float]
    """Sums of samples and tokens, if they were logged."""
    values: Sequence[ValueRange]
    gradient: ValueRange | None
    """The norm over all parameters."""
    layers: Sequence[ValueRange]
    """The norms of the layers, the largest norm first."""
    nonfinite: Mapping[str, int]
    """Steps in which each name was NaN or infinite. A step lists its first names only."""
    nonfinite_values: Mapping[str, int]
    """Number of NaN or infinite values of each logged name except the loss, the most frequent first."""
    onset: Onset | None = None
    """None: no value was NaN or infinite."""
    norm_steps: int = 0
    """Steps whose gradient norms were read."""

    def partly_checked(self, steps: int) -> str:
        """Return on how many steps NaN could be seen; empty if the loss was logged or all gradients were read."""
        if self.norm_steps >= steps or _LOSS in self.nonfinite or any(track.name == _LOSS for track in self.values):
            return ""
        return f"No loss was logged, and gradient norms were read on {self.norm_steps:,} of {steps:,} steps"


@dataclass(slots=True)
class ValueRangeCollector:
    """Collect value ranges from the lines of a run. Memory does not grow with the number of steps."""

    totals: Counter[str] = field(default_factory=Counter)
    nonfinite: Counter[str] = field(default_factory=Counter)
    _nonfinite_values: Counter[str] = field(default_factory=Counter)
    norm_steps: int = 0
    _onset: Onset | None = None
    _finite_norm_steps: int = 0
    """Steps from the onset on whose gradient norms are finite."""
    _last_step: int | None = None
    _finite: dict[str, StepValue] = field(default_factory=dict)
    """The last finite value of each name."""
    _values: dict[str, ValueRange] = field(default_factory=dict)
    _gradient: dict[str, ValueRange] = field(default_factory=dict)
    _layers: dict[LayerId, ValueRange] = field(default_factory=dict)

    def add(self, line: RecordLine) -> None:
        """Add a step, an evaluation, or values that were logged after their step had ended."""
        nonfinite = line.nonfinite or ((_LOSS,) if line.values.get(_LOSS, "") is None else ())
        if nonfinite:
            self._add_nonfinite(line, nonfinite)
        if line.kind == "step":
            self._last_step = line.number
        self._add_values(line)
        if line.gradient_norm is not None:
            _extend(self._gradient, _ALL, line.gradient_norm)
            self._finite[_ALL] = StepValue(line.number, line.gradient_norm)
            self._finite_norm_steps += line.kind == "step" and self._onset is not None
        elif line.gradient_norms and _ALL in self._gradient:
            self._gradient[_ALL] = self._gradient[_ALL]._replace(last=None)
        self.norm_steps += line.kind == "step" and bool(line.gradient_norms or line.gradient_norm is not None)
        for model, norms in line.gradient_norms.items():
            for path, norm in norms.items():
                layer = LayerId(model, path)
                if norm is not None:
                    _extend(self._layers, layer, norm)
                elif layer in self._layers:
                    self._layers[layer] = self._layers[layer]._replace(last=None)
        self.nonfinite.update(nonfinite)

    def _add_values(self, line: RecordLine) -> None:
        for name, value in line.values.items():
            if value is None and name in self._values:
                self._values[name] = self._values[name]._replace(last=None)
            if value is None and name != _LOSS:
                self._nonfinite_values[name] += 1
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if name in LOGGED_COUNTS:
                self.totals[name] += min(value, MAX_SUMMED)  # type: ignore[assignment] # sums may be fractions in other programs' files
            else:
                _extend(self._values, name, value)
                self._finite[name] = StepValue(line.number, value)

    def result(self) -> ValueRanges:
        """Return the ranges of all lines added so far."""
        order = {name: position for position, name in enumerate(LOGGED_NAMES)}
        named = layer_names(self._layers)
        layers = [track._replace(name=named[layer]) for layer, track in self._layers.items()]
        return ValueRanges(
            totals=dict(self.totals),
            values=sorted(self._values.values(), key=lambda track: (order.get(track.name, len(order)), track.name)),
            gradient=next(iter(self._gradient.values()), None),
            layers=sorted(layers, key=lambda track: (-track.largest, track.name)),
            nonfinite=dict(self.nonfinite.most_common()),
            nonfinite_values=dict(self._nonfinite_values.most_common()),
            onset=self._onset and replace(self._onset, finite_norm_steps=self._finite_norm_steps),
            norm_steps=self.norm_steps,
        )

    def _add_nonfinite(self, line: RecordLine, names: Sequence[str]) -> None:
        """Store the first line with NaN or infinite values, and the first such line that names layers."""
        if self._onset is None:
            loss = line.values.get(_LOSS)
            self._onset = Onset(
                kind="evaluation" if line.kind == "evaluation" else "step",
                number=line.number,
                loss=_LOSS in names,
                loss_here=loss if isinstance(loss, int | float) else None,
                loss_before=self._finite.get(_LOSS),
                gradient_norm_before=self._finite.get(_ALL),
                last_step=self._last_step,
            )
        layers = [name.removeprefix(_GRADIENT) for name in names if name.startswith(_GRADIENT)]
        if layers and not self._onset.layers:
            self._onset = replace(self._onset, layers=layers, layers_step=line.number)


def _extend(tracks: dict[Key, ValueRange], key: Key, value: float) -> None:
    previous = tracks.get(key)
    if previous is None:
        tracks[key] = ValueRange(str(key), 1, value, value, value, value)
    else:
        low, high = min(previous.smallest, value), max(previous.largest, value)
        tracks[key] = ValueRange(previous.name, previous.steps + 1, previous.first, value, low, high)
