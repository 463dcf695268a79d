"""What was logged and the gradients' norms over a run: where each began, where it ended, how far it went; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torchotel.report.read import UnitLine

COUNTED = ("samples", "tokens")
"""Logged values that add up over the run."""
MOST_COUNTED = 2**63
"""Of one line: a stranger's could add up to more than a float can hold."""
FIRST = ("loss", "lr", "epoch")
"""Logged values that stand before the others, which follow in the order of their names."""


class Track(NamedTuple):
    """A number over the steps that said it."""

    name: str
    steps: int
    first: float
    last: float
    smallest: float
    largest: float


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


@dataclass(slots=True)
class Tracks:
    """Take in the lines of a run one by one; what is kept does not grow with the steps."""

    totals: Counter[str] = field(default_factory=Counter)
    nonfinite: Counter[str] = field(default_factory=Counter)
    _values: dict[str, Track] = field(default_factory=dict)
    _gradient: dict[str, Track] = field(default_factory=dict)
    _layers: dict[str, Track] = field(default_factory=dict)

    def add(self, line: UnitLine) -> None:
        """Take in a step, an evaluation, or what was logged when its step was gone."""
        for name, value in line.values.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if name in COUNTED:
                self.totals[name] += min(value, MOST_COUNTED)  # type: ignore[assignment] # whole but in a file of a stranger's
            else:
                _extend(self._values, name, value)
        if line.gradient_norm is not None:
            _extend(self._gradient, "all parameters", line.gradient_norm)
        several = len(line.gradient_norms) > 1
        for model, norms in line.gradient_norms.items():
            for path, norm in norms.items():
                if norm is not None:
                    _extend(self._layers, f"{model}: {path}" if several else path, norm)
        self.nonfinite.update(line.nonfinite)

    def result(self) -> Tracked:
        """Return what came of it."""
        order = {name: place for place, name in enumerate(FIRST)}
        return Tracked(
            totals=dict(self.totals),
            values=sorted(self._values.values(), key=lambda track: (order.get(track.name, len(order)), track.name)),
            gradient=next(iter(self._gradient.values()), None),
            layers=sorted(self._layers.values(), key=lambda track: (-track.largest, track.name)),
            nonfinite=dict(self.nonfinite.most_common()),
        )


def _extend(tracks: dict[str, Track], name: str, value: float) -> None:
    known = tracks.get(name)
    if known is None:
        tracks[name] = Track(name, 1, value, value, value, value)
    else:
        low, high = min(known.smallest, value), max(known.largest, value)
        tracks[name] = Track(name, known.steps + 1, known.first, value, low, high)
