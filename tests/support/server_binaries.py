"""The binaries of real servers, for tests that can't do without."""

import os
from pathlib import Path
from typing import NoReturn

import pytest

from tools.backends import Builder, ensure
from torchotel.stack.binaries import Backend

VARIABLES = ("TORCHOTEL_REQUIRE_BACKENDS", "TORCHOTEL_BUILD_TOOLS")
REQUIRED, BUILD_TOOLS = (bool(os.environ.get(name)) for name in VARIABLES)
"""The first is set where a test that is skipped would go unnoticed: what is missing fails it then."""


def built(backend: Backend, name: str | None = None) -> Path:
    """Give a binary of a server; the test is skipped where it is missing."""
    if not backend.is_complete:
        missing(f"{_not_there(backend)}; `make backends` builds it")
    return backend.binary(name)


def tool(backend: Backend, build: Builder) -> Path:
    """Give the binary of what only a test needs; it is built there on request, and else the test is skipped."""
    if not backend.is_complete and not BUILD_TOOLS:
        missing(f"{_not_there(backend)}; TORCHOTEL_BUILD_TOOLS=1 builds it")
    return ensure(backend, build)


def missing(reason: str) -> NoReturn:
    """Fail the test where what it needs is required, and else skip it."""
    if REQUIRED:
        pytest.fail(reason)
    pytest.skip(reason)


def _not_there(backend: Backend) -> str:
    return f"{backend.name} {backend.version} is not in {backend.folder}"
