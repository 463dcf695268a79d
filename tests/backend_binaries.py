"""The binaries of real servers, for tests that can't do without."""

import os
from pathlib import Path

import pytest

from torchotel.stack.backends import Backend, ensure


def built(backend: Backend, name: str | None = None) -> Path:
    """Give a binary of a server; the test is skipped where it is missing."""
    if not backend.is_there:
        pytest.skip(f"{backend.name} {backend.version} is not in {backend.folder}; `make backends` builds it")
    return backend.binary(name)


def tool(backend: Backend) -> Path:
    """Give the binary of what only a test needs; it is built there on request, and else the test is skipped."""
    if not backend.is_there and not os.environ.get("TORCHOTEL_BUILD_TOOLS"):
        pytest.skip(f"{backend.name} {backend.version} is not in {backend.folder}; TORCHOTEL_BUILD_TOOLS=1 builds it")
    return ensure(backend)
