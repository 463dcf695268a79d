"""Figures as Markdown: the terminal shows what the page has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.gate import Compared
from benchmarks.parts import Cell, Part, Table
from benchmarks.spread import FEWEST, Spread
from benchmarks.targets import Reached

PAGE = Path(__file__).parents[1] / "docs" / "overhead.md"
_VERDICTS = {True: "yes", False: "**no**", None: "can't tell"}
_WORSE = {True: "**worse**", False: "no", None: "can't tell"}
_BEGIN, _END = "<!-- figures -->\n", "<!-- end of figures -->"


def section(part: Part, table: Table) -> str:
    """Show a part: its title, its table, and what to know of it."""
    columns = list(next(iter(table.values())))
    rows = [[name, *(_cell(cells[column]) for column in columns)] for name, cells in table.items()]
    return f"### {part.title}\n\n{_table(['', *columns], rows)}\n\n{part.note}"


def targets_section(reached: Sequence[Reached]) -> str:
    """Show what was to be reached."""
    rows = [
        [
            f"{target.part}: {target.what}",
            f"{'≥' if target.at_least else '≤'} {_number(target.limit)}",
            "-" if figure is None else _number(figure),
            _VERDICTS[verdict],
        ]
        for target, figure, verdict in reached
    ]
    return f"### What it must reach\n\n{_table(['', 'reach', 'reached', 'met'], rows)}"


def gate_section(compared: Sequence[Compared], machine: str) -> str:
    """Show each share beside the baseline's, and what machine that is from: another may differ by nothing but that."""
    rows = [[one.what, _cell(one.then), _cell(one.now), _number(one.empty), _WORSE[one.worse]] for one in compared]
    return f"### Beside the baseline\n\nThen: {machine}\n\n{_table(['', 'then', 'now', 'empty hooks', 'worse'], rows)}"


def write(sections: Sequence[str]) -> None:
    """Put the sections between the page's marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    after = rest.partition(_END)[2]
    PAGE.write_text(f"{before}{_BEGIN}\n" + "\n\n".join(sections) + f"\n\n{_END}{after}", encoding="utf-8")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Cell) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return _spread(value)
    return _number(value)


def _spread(value: Spread) -> str:
    if value["count"] < FEWEST:
        return f"{_number(value['median'])} (of {value['count']})"
    return f"{_number(value['median'])} ({_number(value['low'])} … {_number(value['high'])})"


def _number(value: float) -> str:
    """Show three digits or more where there is something after the point to see."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.3f}"
