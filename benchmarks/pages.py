"""Format figures as Markdown, for the terminal and for the page."""

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
    """Format a part: its title, its table and its note."""
    columns = list(next(iter(table.values())))
    rows = [[name, *(_cell(cells[column]) for column in columns)] for name, cells in table.items()]
    return f"### {part.title}\n\n{_table(['', *columns], rows)}\n\n{part.note}"


def targets_section(reached: Sequence[Reached]) -> str:
    """Format the targets and their verdicts."""
    rows = [
        [
            f"{target.part}: {target.what}",
            f"{'≥' if target.at_least else '≤'} {_number(target.limit)}",
            "-" if figure is None else _number(figure),
            _VERDICTS[verdict],
        ]
        for target, figure, verdict in reached
    ]
    return f"### Targets\n\n{_table(['', 'target', 'figure', 'met'], rows)}"


def gate_section(compared: Sequence[Compared], machine: str) -> str:
    """Format each share with that of the baseline, and the baseline's machine, because machines differ."""
    rows = [[one.what, _cell(one.then), _cell(one.now), _number(one.empty), _WORSE[one.worse]] for one in compared]
    table = _table(["", "then", "now", "empty hooks", "worse"], rows)
    return f"### Comparison with the baseline\n\nThen: {machine}\n\n{table}"


def write(sections: Sequence[str]) -> None:
    """Write the sections between the two marks of the page."""
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
    """Format a number with three significant digits, or with all digits before the point."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.3f}"
