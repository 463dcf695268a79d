"""What a part of the benchmark is, and the form of its figures: the same in memory, in JSON and on the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from benchmarks.sink import Sink
from benchmarks.spread import Spread

Cell: TypeAlias = Spread | float | str
Table: TypeAlias = dict[str, dict[str, Cell]]
"""Rows by their names, in each the cells by their columns; all rows have the same."""
Tables: TypeAlias = Mapping[str, Table]
"""Those of all parts that were measured, by their names."""


class Conditions(NamedTuple):
    """Where and how long to measure."""

    sink: Sink
    """Takes what is sent."""
    quick: bool
    """As short as it can be: does it run?"""
    longer: float
    """How many times as long as usual the instruments are compared."""
    memory_steps: int
    """Of the training whose memory is looked at."""
    tell: Callable[[str], None] = lambda _: None
    """Shows how far a part is that takes minutes."""

    def rounds(self, usual: int) -> int:
        """Return how often to look: twice where it is quick, for one figure has no spread."""
        return 2 if self.quick else usual


class Part(NamedTuple):
    """One table of the benchmark."""

    name: str
    """Under which its figures stand in the JSON."""
    title: str
    note: str
    """What the columns say, and what to know before they are believed."""
    measure: Callable[[Conditions], Table]


def cell(table: Table, row: str, column: str, *, upper: bool = False) -> float:
    """Read one figure: of a spread the median, or the upper bound."""
    found = table[row][column]
    assert not isinstance(found, str), found
    return found if not isinstance(found, dict) else found["high" if upper else "median"]
