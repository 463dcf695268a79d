"""The binaries of real servers, for tests that can't do without."""

import os
from pathlib import Path

import pytest

from torchotel.stack.backends import Backend


def built(backend: Backend, name: str | None = None) -> Path:
    """Give a server's binary; where it is missing the test is skipped, and in CI it fails."""
    if not backend.is_there:
        say = pytest.fail if os.environ.get("CI") else pytest.skip
        say(f"{backend.name} {backend.version} is not in {backend.folder}; `make backends` builds it")
    return backend.binary(name)
