"""Whether anything got worse: shares of what the naive way costs, which are alike on machines of any speed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks import overhead
from benchmarks.modes import EMPTY
from benchmarks.parts import Tables
from benchmarks.spread import FEWEST, Spread

MOST_WORSE = 1.25
LEAST = 0.01
"""Of what the naive way costs: a share near zero doubles for nothing."""


class Compared(NamedTuple):
    """A share then and now."""

    what: str
    then: Spread
    now: Spread
    empty: float
    """The share of hooks that do nothing, now: nothing that hooks modules comes below that."""

    @property
    def worse(self) -> bool | None:
        """Whether it is, by more than a quarter and by more than next to nothing; None where that may be noise."""
        longer = self.now["median"] - self.then["median"]
        if longer <= max(LEAST, (MOST_WORSE - 1) * self.then["median"]):
            return False
        sure = self.now["low"] > self.then["high"] and min(self.now["count"], self.then["count"]) >= FEWEST
        return True if sure else None


def compare(now: Tables, then: Tables) -> Iterator[Compared]:
    """Set each of torchotel's shares beside that of the baseline, where both were measured."""
    for part, table in now.items():
        for row, cells in table.items():
            before = then.get(part, {}).get(row, {})
            for column in (overhead.SHARE, overhead.SHARE_CPU):
                one, other = before.get(column), cells.get(column)
                if row.startswith("torchotel") and isinstance(one, dict) and isinstance(other, dict):
                    empty = table[EMPTY][column]
                    assert isinstance(empty, dict)
                    yield Compared(f"{part}, {row}: {column}", one, other, empty["median"])
