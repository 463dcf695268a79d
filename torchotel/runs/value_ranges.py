"""What was logged and the gradients' norms over a run: where each began, where it ended, how far it went; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from torchotel._utils.text import cut
from torchotel.runs.reader import RecordLine

COUNTED = ("samples", "tokens")
"""Logged values that add up over the run."""
MAX_COUNTED = 2**63
"""Of one line: a stranger's could add up to more than a float can hold."""
FIRST = ("loss", "lr", "epoch")
"""Logged values that stand before the others, which follow in the order of their names."""


NOT_FINITE = "NaN or Inf"
"""In place of a number: a run file has null for both."""

_LOSS, _ALL = "loss", "all parameters"
_GRADIENT = "gradient "
"""Before the path of a layer in `torch.nonfinite`."""
_SHOWN_LAYERS = 3

Key = TypeVar("Key")


class Track(NamedTuple):
    """A number over the steps that have it."""

    name: str
    steps: int
    """Those in which it was finite."""
    first: float
    last: float | None
    """None: NaN or infinite."""
    smallest: float
    largest: float


class LayerId(NamedTuple):
    """A layer with gradient norms."""

    model: str
    path: str


def layer_names(layers: Iterable[LayerId]) -> Mapping[LayerId, str]:
    """Name all layers of a run: by path, with the model's name before it if the run has several models."""
    found = list(layers)
    several = len({layer.model for layer in found}) > 1
    return {layer: f"{layer.model}: {layer.path}" if several else layer.path for layer in found}


class At(NamedTuple):
    """A number and the step that it is of."""

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
    loss_before: At | None
    """The last finite loss of the steps before."""
    gradient_norm_before: At | None
    """The last finite norm of all gradients of the steps before."""
    layers: Sequence[str] = ()
    """The first layers with such gradients, in backward order; paths."""
    layers_step: int = 0
    """The step of `layers`: not every step has gradient norms."""

    def first_layers(self) -> str:
        """Name the first layers in one line; empty if no gradient was NaN or infinite."""
        names = ", ".join(cut(path) for path in self.layers[:_SHOWN_LAYERS])
        more = len(self.layers) - _SHOWN_LAYERS
        return names + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """The numbers of a run, each over its steps."""

    totals: Mapping[str, float]
    """Samples and tokens, where they were logged."""
    values: Sequence[Track]
    gradient: Track | None
    """The norm over all parameters."""
    layers: Sequence[Track]
    """The norms of the layers, the largest first."""
    nonfinite: Mapping[str, int]
    """In how many steps what was NaN or infinite; steps name their first ones only."""
    onset: Onset | None = None
    """None: nothing was NaN or infinite."""
    norm_steps: int = 0
    """Steps whose gradient norms were read."""

    def partly_checked(self, steps: int) -> str:
        """State on how many steps NaN could be seen; empty if the loss was logged or all gradients were read."""
        if self.norm_steps >= steps or _LOSS in self.nonfinite or any(track.name == _LOSS for track in self.values):
            return ""
        return f"No loss was logged, and gradient norms were read on {self.norm_steps:,} of {steps:,} steps"


@dataclass(slots=True)
class Tracks:
    """Take in the lines of a run one by one; what is kept does not grow with the steps."""

    totals: Counter[str] = field(default_factory=Counter)
    nonfinite: Counter[str] = field(default_factory=Counter)
    norm_steps: int = 0
    _onset: Onset | None = None
    _finite: dict[str, At] = field(default_factory=dict)
    """The last finite value of each name."""
    _values: dict[str, Track] = field(default_factory=dict)
    _gradient: dict[str, Track] = field(default_factory=dict)
    _layers: dict[LayerId, Track] = field(default_factory=dict)

    def add(self, line: RecordLine) -> None:
        """Take in a step, an evaluation, or what was logged when its step was gone."""
        nonfinite = line.nonfinite or ((_LOSS,) if line.values.get(_LOSS, "") is None else ())
        if nonfinite:
            self._add_nonfinite(line, nonfinite)
        self._add_values(line)
        if line.gradient_norm is not None:
            _extend(self._gradient, _ALL, line.gradient_norm)
            self._finite[_ALL] = At(line.number, line.gradient_norm)
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
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if name in COUNTED:
                self.totals[name] += min(value, MAX_COUNTED)  # type: ignore[assignment] # whole but in a file of a stranger's
            else:
                _extend(self._values, name, value)
                self._finite[name] = At(line.number, value)

    def result(self) -> Tracked:
        """Return what came of it."""
        order = {name: place for place, name in enumerate(FIRST)}
        named = layer_names(self._layers)
        layers = [track._replace(name=named[layer]) for layer, track in self._layers.items()]
        return Tracked(
            totals=dict(self.totals),
            values=sorted(self._values.values(), key=lambda track: (order.get(track.name, len(order)), track.name)),
            gradient=next(iter(self._gradient.values()), None),
            layers=sorted(layers, key=lambda track: (-track.largest, track.name)),
            nonfinite=dict(self.nonfinite.most_common()),
            onset=self._onset,
            norm_steps=self.norm_steps,
        )

    def _add_nonfinite(self, line: RecordLine, names: Sequence[str]) -> None:
        """Note the first line with such values, and the first that names layers."""
        if self._onset is None:
            loss = line.values.get(_LOSS)
            self._onset = Onset(
                kind="evaluation" if line.kind == "evaluation" else "step",
                number=line.number,
                loss=_LOSS in names,
                loss_here=loss if isinstance(loss, int | float) else None,
                loss_before=self._finite.get(_LOSS),
                gradient_norm_before=self._finite.get(_ALL),
            )
        layers = [name.removeprefix(_GRADIENT) for name in names if name.startswith(_GRADIENT)]
        if layers and not self._onset.layers:
            self._onset = replace(self._onset, layers=layers, layers_step=line.number)


def _extend(tracks: dict[Key, Track], key: Key, value: float) -> None:
    known = tracks.get(key)
    if known is None:
        tracks[key] = Track(str(key), 1, value, value, value, value)
    else:
        low, high = min(known.smallest, value), max(known.largest, value)
        tracks[key] = Track(known.name, known.steps + 1, known.first, value, low, high)
