"""Imports go one way: words, the waist, then capture, telemetry and exporters, the session, the front."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "torchotel"
FILES = sorted(PACKAGE.rglob("*.py"))

WORDS = {
    "_errors",
    "_names",
    "_unset",
    "_utils",
    "config",
}
WAIST = {"_buffer", "_records"}
REPORT = {"runs"}
SESSION = {"_handle", "_session", "_stats"}
FRONT = {"__init__", "__main__", "_annotate", "_instrument", "_zero_code", "cli", "instrumentor", "testing"}

MAY_IMPORT: dict[str, set[str]] = {
    **dict.fromkeys(WORDS, WORDS),
    **dict.fromkeys(WAIST, WORDS | WAIST),
    "capture": WORDS | WAIST | {"capture"},
    "telemetry": WORDS | WAIST | {"telemetry"},
    "exporters": WORDS | WAIST | {"telemetry", "exporters"},
    "_worker": WORDS | WAIST | {"telemetry"},
    "_pipeline": WORDS | WAIST | {"telemetry"},
    "integrations": WORDS | {"capture", "integrations"},
    "_publisher": WORDS | WAIST | {"telemetry", "exporters"},
    "_versions": WORDS,
    "_exporting": WORDS | WAIST | {"telemetry", "exporters"},
    "_session": WORDS
    | WAIST
    | {"capture", "telemetry", "exporters", "integrations"}
    | {"_exporting", "_pipeline", "_publisher", "_stats", "_versions", "_worker"},
    "_stats": set(),
    "_handle": WORDS | {"_session", "_stats"},
    "runs": WORDS | REPORT,
    "stack": WORDS | {"stack"},
    "doctor": WORDS | WAIST | {"capture", "telemetry", "exporters", "_session", "stack", "doctor"},
    **dict.fromkeys(
        FRONT, WORDS | WAIST | REPORT | FRONT | SESSION | {"capture", "telemetry", "exporters", "doctor", "stack"}
    ),
}
"""Parts of torchotel by what they may import of it; a new part takes its place here."""

THIRD_PARTY: dict[str, set[str]] = {
    "config": {"yaml"},
    "capture": {"torch"},
    "telemetry": {"opentelemetry"},
    "exporters": {"opentelemetry", "requests", "urllib3", "google", "grpc", "prometheus_client"},
    "integrations": {"torch", "transformers", "lightning", "pytorch_lightning"},
    "runs": {"plotly"},
    "_versions": {"torch"},
    "_exporting": {"opentelemetry"},
    "_session": {"torch", "opentelemetry"},
    "_handle": {"torch"},
    "doctor": {"torch", "opentelemetry", "requests"},
    "instrumentor": {"opentelemetry"},
    "testing": {"torch", "opentelemetry"},
}
"""What else they may import; all others take the standard library alone."""


def _part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path) -> Iterator[str]:
    """Name what a file imports anywhere but for type checking; torchotel's as `torchotel.<part>`."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _short(alias.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "torchotel":
                yield from (_short(f"torchotel.{alias.name}") for alias in node.names)
            else:
                yield _short(node.module or "")


def _short(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2] if parts[0] == "torchotel" else parts[:1])


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    part = _part(path)
    ours = {name.partition(".")[2] or "__init__" for name in _imports(path) if name.split(".")[0] == "torchotel"}
    assert ours <= MAY_IMPORT[part]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_capture_knows_torch_and_only_what_follows_the_waist_knows_telemetry(path: Path) -> None:
    others = {name for name in _imports(path) if name.split(".")[0] != "torchotel"}
    assert others - set(sys.stdlib_module_names) <= THIRD_PARTY.get(_part(path), set())
