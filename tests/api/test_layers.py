"""Imports go one way: types and utilities, records, capture | tracing | metrics, exporters, the session, the API."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "torchotel"
FILES = sorted(PACKAGE.rglob("*.py"))

BASE = {"_types", "_semconv", "_limits", "_collectives", "_utils", "config"}
RECORDS = BASE | {"_records"}
PRODUCT = RECORDS | {"capture", "sampling", "tracing", "metrics", "exporters", "integrations", "worker"}

MAY_IMPORT: dict[str, set[str]] = {
    **dict.fromkeys(BASE, BASE),
    "_records": RECORDS,
    "sampling": RECORDS | {"sampling"},
    "capture": RECORDS | {"sampling", "capture"},
    "tracing": RECORDS | {"tracing"},
    "metrics": RECORDS | {"tracing", "metrics"},
    "exporters": RECORDS | {"tracing", "metrics", "exporters"},
    "integrations": BASE | {"capture", "integrations"},
    "worker": RECORDS | {"sampling", "tracing", "metrics", "exporters", "worker"},
    "_session": PRODUCT,
    "_lifecycle": BASE,
    "_handle": BASE | {"_lifecycle", "_session", "worker"},
    "runs": RECORDS | {"runs"},
    "stack": BASE | {"stack"},
    "doctor": PRODUCT | {"_session", "stack", "doctor"},
    "_api": BASE | {"_lifecycle", "_handle", "_session"},
    "__init__": BASE | {"_api"},
    "_auto_instrument": BASE | {"_lifecycle", "_api"},
    "instrumentor": BASE | {"_api", "_auto_instrument"},
    "testing": PRODUCT | {"_lifecycle", "_handle", "_session"},
    "cli": BASE | {"_api", "_auto_instrument", "_handle", "_session", "exporters", "runs", "doctor", "stack", "cli"},
    "__main__": {"cli"},
}
"""What each part of torchotel may import; a new part is added here."""

THIRD_PARTY: dict[str, set[str]] = {
    "config": {"yaml"},
    "capture": {"torch"},
    "tracing": {"opentelemetry"},
    "exporters": {"opentelemetry", "requests", "urllib3", "google", "grpc", "prometheus_client"},
    "integrations": {"torch", "transformers", "lightning", "pytorch_lightning"},
    "runs": {"plotly", "jinja2"},
    "_session": {"torch", "opentelemetry"},
    "_handle": {"torch"},
    "doctor": {"torch", "opentelemetry", "requests", "packaging"},
    "instrumentor": {"opentelemetry"},
    "testing": {"torch", "opentelemetry"},
}
"""The libraries that each part may import; all others import the standard library alone."""


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
def test_only_capture_imports_torch_and_only_tracing_and_exporters_import_opentelemetry(path: Path) -> None:
    others = {name for name in _imports(path) if name.split(".")[0] != "torchotel"}
    assert others - set(sys.stdlib_module_names) <= THIRD_PARTY.get(_part(path), set())
