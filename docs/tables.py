"""Generate the tables of the pages from the code. `make docs` runs it.

A table stands between two comments in a page.
"""

import ast
import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torchotel import _semconv, instrument
from torchotel.config.config import SETTINGS, Config
from torchotel.config.otel_variables import SECTIONS
from torchotel.config.settings import field_docs
from torchotel.metrics.instruments import TABLE

FOLDER = Path(__file__).parent
_MARKED = re.compile(r"(?P<start><!-- table: (?P<name>[\w ]+) -->\n).*?(?P<end><!-- end of table -->)", re.DOTALL)


_READERS = {"torchotel": "torchotel", "SDK": "the SDK, for torchotel", "provider": "your provider", "none": "unused"}


class Documented(NamedTuple):
    """A constant of a module with its documentation string."""

    section: str
    """The nearest comment line above the constant."""
    name: str
    text: str


def filled(page: str) -> str:
    """Return the page with its tables generated from the code."""
    return _MARKED.sub(lambda found: f"{found['start']}{TABLES[found['name']]()}{found['end']}", page)


def documented(module: ModuleType) -> Iterator[Documented]:
    """Yield the constants of a module that have a documentation string."""
    source = inspect.getsource(module)
    comments = [(at, line[2:]) for at, line in enumerate(source.splitlines(), 1) if line.startswith("# ")]
    for node, below in itertools.pairwise(ast.parse(source).body):
        match node, below:
            case (
                ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)),
                ast.Expr(ast.Constant(str(text))),
            ):
                above = [comment for at, comment in comments if at < node.lineno]
                yield Documented(above[-1] if above else "", name, text)


def _metrics() -> str:
    rows = (
        (
            f"`{one.prometheus_name}{'_total' if one.kind == 'counter' else ''}`<br>`{one.name}`",
            one.kind,
            f"`{one.unit}`" if one.unit else "",
            ", ".join(f"`{label.replace('.', '_')}`" for label in one.labels),
            one.description.rstrip("."),
        )
        for one in TABLE
    )
    return _table(("Prometheus, OpenTelemetry", "kind", "unit", "labels", "meaning"), rows)


def _named(section: str) -> Callable[[], str]:
    """Return a function that makes the table of a section of `_semconv`. A text may begin with a type and a colon."""

    def table() -> str:
        rows = []
        for one in documented(_semconv):
            if one.section == section:
                name = getattr(_semconv, one.name) + ("…" if one.name.endswith("_PREFIX") else "")
                kind, colon, text = one.text.partition(": ")
                rows.append((f"`{name}`", *((kind, text) if colon and not kind[0].isupper() else ("", one.text))))
        if not any(kind for _, kind, _ in rows):
            return _table(("name", "meaning"), [(name, text) for name, _, text in rows])
        return _table(("name", "type", "meaning"), rows)

    return table


def _settings(*, arguments: bool) -> Callable[[], str]:
    """Return a function that makes the table of the settings that are arguments of `instrument()`, or of the others."""

    def table() -> str:
        given = inspect.signature(instrument).parameters
        texts = field_docs(Config)
        rows = []
        for field in dataclasses.fields(Config):
            if (field.name in given) == arguments:
                setting = SETTINGS[field.name]
                names = [f"`{variable}`" for variable in setting.variables]
                meaning = f"{texts[field.name]} *Takes {setting.kind.takes}.*"
                rows.append(((f"`{field.name}`", *names) if arguments else names, _default(field), meaning))
        cells = [("<br>".join(names), default, meaning) for names, default, meaning in rows]
        return _table(("argument, variables" if arguments else "variable", "default", "meaning"), cells)

    return table


def _environment() -> str:
    """Make one table for each section of the specification's variables."""
    parts = []
    for section, variables in SECTIONS.items():
        rows = [(f"`{one.name}`", _READERS[one.reader], one.does) for one in variables]
        parts.append(f"\n## {section}\n\n{_table(('variable', 'read by', 'effect'), rows)}")
    return "".join(parts) + "\n"


def _worked() -> str:
    """Make the table of worked examples with the code on the page."""
    page = (FOLDER / "sizing.md").read_text(encoding="utf-8")
    (code,) = re.findall(r'```python title="sizing.py"\n(.*?)```', page, re.DOTALL)
    names: dict[str, Any] = {"__name__": "sizing"}
    exec(code, names)  # noqa: S102  # the code of a page of this repository
    return _table(*names["worked"]())


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    match value:
        case str():
            return f"`{value}`" if value else ""
        case Mapping() | tuple():
            return f"`{','.join(value)}`" if value else "none"
        case float():
            return f"`{value:g}`" + (" s" if field.name.endswith("_s") else "")
    return f"`{value}`"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


TABLES: Mapping[str, Callable[[], str]] = {
    "metrics": _metrics,
    "spans": _named("Span names."),
    "module attributes": _named("Attributes of module spans."),
    "step attributes": _named("Attributes of steps and phases."),
    "collective attributes": _named("Attributes of collectives."),
    "events": _named("Events."),
    "resource": _named("Resource."),
    "arguments": _settings(arguments=True),
    "variables": _settings(arguments=False),
    "environment": _environment,
    "sizing": _worked,
}

if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        path.write_text(filled(text), encoding="utf-8")
