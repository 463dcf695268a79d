"""Where the stack's files are: those that are shipped, and those that a machine keeps."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

_PRIVATE = 0o700


def shipped() -> Path:
    """Find `deploy/` in an installed package, or beside the package in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "deploy"
    return installed if installed.is_dir() else package.parent / "deploy"


def state() -> Path:
    """Make the folder of what outlives a command."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = Path(home) / "torchotel" / "stack"
    folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    return folder


def targets() -> Path:
    """Make the folder in which ranks name their endpoints: TORCHOTEL_DISCOVERY_DIR, as for the training itself."""
    folder = Path(os.environ.get("TORCHOTEL_DISCOVERY_DIR") or state() / "targets").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def grafana_password() -> str:
    """Give the password of Grafana's admin: GRAFANA_PASSWORD, else one of this machine's own."""
    file = state() / "grafana-password"
    if os.environ.get("GRAFANA_PASSWORD"):
        return os.environ["GRAFANA_PASSWORD"]
    if not file.exists():
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(secrets.token_urlsafe(12))
    return file.read_text()
