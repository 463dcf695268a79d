"""Where the stack's files are: those that are shipped, and those that a machine keeps."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class Kind:
    """Which stack is up."""

    native: bool = False
    small: bool = False

    def __str__(self) -> str:
        words = "as plain processes" if self.native else "in containers"
        return f"{words}, without the Collector" if self.small else words

    def keep(self) -> None:
        """Remember it for `down` and `status`."""
        _kind_file().write_text(json.dumps(asdict(self)))


def kept_kind() -> Kind | None:
    """Give which stack was brought up; None where none was."""
    file = _kind_file()
    return Kind(**json.loads(file.read_text())) if file.exists() else None


def forget_kind() -> None:
    """Say that no stack is up."""
    _kind_file().unlink(missing_ok=True)


def _kind_file() -> Path:
    return state() / "up.json"
