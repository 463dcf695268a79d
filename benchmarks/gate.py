"""Comparison with the baseline, by shares of the naive cost, which hardly depend on the machine's speed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks import overhead
from benchmarks.modes import EMPTY
from benchmarks.parts import Tables
from benchmarks.spread import FEWEST, Spread

MOST_WORSE = 1.25
LEAST = 0.01
"""Smaller changes of a share of the naive cost are ignored: a share near zero doubles easily."""


class Compared(NamedTuple):
    """A share in the baseline and now."""

    what: str
    then: Spread
    now: Spread
    empty: float
    """The current share of empty hooks, the minimum for any instrument with module hooks."""

    @property
    def worse(self) -> bool | None:
        """Whether the share grew by more than a quarter and by more than `LEAST`; None if that may be noise."""
        longer = self.now["median"] - self.then["median"]
        if longer <= max(LEAST, (MOST_WORSE - 1) * self.then["median"]):
            return False
        sure = self.now["low"] > self.then["high"] and min(self.now["count"], self.then["count"]) >= FEWEST
        return True if sure else None


def compare(now: Tables, then: Tables) -> Iterator[Compared]:
    """Compare each of torchotel's shares with that of the baseline, if both were measured."""
    for part, table in now.items():
        for row, cells in table.items():
            before = then.get(part, {}).get(row, {})
            for column in (overhead.SHARE, overhead.SHARE_CPU):
                one, other = before.get(column), cells.get(column)
                if row.startswith("torchotel") and isinstance(one, dict) and isinstance(other, dict):
                    empty = table[EMPTY][column]
                    assert isinstance(empty, dict)
                    yield Compared(f"{part}, {row}: {column}", one, other, empty["median"])
