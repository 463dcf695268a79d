"""The binaries of real servers, for tests that can't do without."""

from pathlib import Path

import pytest

from torchotel.stack.backends import Backend


def built(backend: Backend, name: str | None = None) -> Path:
    """Give a binary of a server; the test is skipped where it is missing. `.ci/run` builds them first, or fails."""
    if not backend.is_there:
        pytest.skip(f"{backend.name} {backend.version} is not in {backend.folder}; `make backends` builds it")
    return backend.binary(name)
