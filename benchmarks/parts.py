"""Types of a part of the benchmark and of its figures, used in memory, in JSON and on the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from benchmarks.sink import Sink
from benchmarks.spread import Spread

Cell: TypeAlias = Spread | float | str
Table: TypeAlias = dict[str, dict[str, Cell]]
"""Rows by name; each row has its cells by column, and all rows have the same columns."""
Tables: TypeAlias = Mapping[str, Table]
"""Tables of all measured parts, by name."""


class Conditions(NamedTuple):
    """Receiver and duration of the measurements."""

    sink: Sink
    """Receives the exported spans."""
    quick: bool
    """A short test run."""
    longer: float
    """Factor on the measuring time."""
    memory_steps: int
    """Steps of the memory part."""
    tell: Callable[[str], None] = lambda _: None
    """Shows the progress of a part that takes minutes."""

    def rounds(self, usual: int) -> int:
        """Return the number of rounds: two if `quick`, because one figure has no spread."""
        return 2 if self.quick else usual


class Part(NamedTuple):
    """One table of the benchmark."""

    name: str
    """Key of the figures in the JSON file."""
    title: str
    note: str
    """Meaning of the columns, and limits of the measurement."""
    measure: Callable[[Conditions], Table]


def cell(table: Table, row: str, column: str, *, upper: bool = False) -> float:
    """Return one figure: the median of a spread, or its upper bound."""
    found = table[row][column]
    assert not isinstance(found, str), found
    return found if not isinstance(found, dict) else found["high" if upper else "median"]
