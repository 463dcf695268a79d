"""Podman, for tests that run containers."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.server_binaries import missing

COMPOSE = Path(sys.executable).with_name("podman-compose")
BUSYBOX = Path("/bin/busybox")
"""What the health check of Jaeger's image is run by."""
COMES_WITH = {COMPOSE: "`make setup` installs it", BUSYBOX: "the package busybox-static brings it"}


def need_podman() -> None:
    """Skip the test where podman can't work; where it can, what comes with it may be required."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    works = subprocess.run(["podman", "info"], capture_output=True, text=True, check=False)  # noqa: S607  # the user's
    if works.returncode:
        pytest.skip(f"podman does not work here: {works.stderr[-200:]}")
    for path, advice in COMES_WITH.items():
        if not path.exists():
            missing(f"there is no {path}; {advice}")
