"""The binaries of real servers, for tests that can't do without."""

import os
from pathlib import Path
from typing import NoReturn

import pytest

from torchotel.stack.backends import Backend, ensure

VARIABLES = ("TORCHOTEL_REQUIRE_BACKENDS", "TORCHOTEL_BUILD_TOOLS")
REQUIRED, BUILD_TOOLS = (bool(os.environ.get(name)) for name in VARIABLES)
"""The first is set where a test that is skipped would go unnoticed: what is missing fails it then."""


def built(backend: Backend, name: str | None = None) -> Path:
    """Give a binary of a server; the test is skipped where it is missing."""
    if not backend.is_there:
        _missing(backend, "`make backends` builds it")
    return backend.binary(name)


def tool(backend: Backend) -> Path:
    """Give the binary of what only a test needs; it is built there on request, and else the test is skipped."""
    if not backend.is_there and not BUILD_TOOLS:
        _missing(backend, "TORCHOTEL_BUILD_TOOLS=1 builds it")
    return ensure(backend)


def _missing(backend: Backend, advice: str) -> NoReturn:
    reason = f"{backend.name} {backend.version} is not in {backend.folder}; {advice}"
    if REQUIRED:
        pytest.fail(reason)
    pytest.skip(reason)
