"""Cgroups with a limit, for programs that a test starts."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

MOUNTED = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def limited(controller: str, file: str, file_of_version_1: str, limit: int) -> Iterator[Path]:
    """Yield the folder of a new cgroup; processes outside of it are not affected."""
    version_1 = MOUNTED / controller
    parent, name = (version_1, file_of_version_1) if version_1.is_dir() else (MOUNTED, file)
    folder = parent / f"torchotel-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        # A new cgroup needs root, and in a container a writable mount.
        pytest.skip(f"no cgroup can be made: {error}")
    try:
        try:
            (folder / name).write_text(str(limit))
        except OSError as error:
            # In version 2, the parent must have given the controller to its children.
            pytest.skip(f"the {controller} of a cgroup cannot be limited: {error}")
        yield folder
    finally:
        folder.rmdir()
