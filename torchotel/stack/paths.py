"""Folders and generated configuration files of the stack."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from torchotel._utils.state_dir import own_targets, stack_folder
from torchotel.stack.services import Ports, StackError

_PRIVATE = 0o700


def shipped() -> Path:
    """Return the folder of the stack's files: in an installed package, or `deploy/` in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "deploy"
    return installed if installed.is_dir() else package.parent / "deploy"


def state() -> Path:
    """Return the folder of the stack's state, which is created if it is missing."""
    try:
        return _create(stack_folder(), "XDG_STATE_HOME", mode=_PRIVATE)
    except RuntimeError as error:
        raise StackError(f"{error}: set XDG_STATE_HOME to a folder for the state of the stack") from error


def targets(default: str | None = None) -> str:
    """Return the folder with the scrape endpoints of ranks, which is created if it is missing.

    Args:
        default: Folder to use if TORCHOTEL_DISCOVERY_DIR is not set; None: the folder that ranks use by default.
    """
    path = os.environ.get("TORCHOTEL_DISCOVERY_DIR") or default
    folder = Path(path).absolute() if path else own_targets(state())
    return str(_create(folder, "TORCHOTEL_DISCOVERY_DIR"))


def grafana_password() -> str:
    """Return the password of Grafana's admin: GRAFANA_PASSWORD, else a random one, which is saved."""
    file = state() / "grafana-password"
    if os.environ.get("GRAFANA_PASSWORD"):
        return os.environ["GRAFANA_PASSWORD"]
    if not file.exists():
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(secrets.token_urlsafe(12))
    return file.read_text()


def _create(folder: Path, variable: str, mode: int = 0o777) -> Path:
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        raise StackError(f"{folder} cannot be created ({error.strerror}): set {variable} to another folder") from error
    return folder


def collector_targets(ports: Ports, *, small: bool) -> str:
    """Return `prometheus/collector.json`: scrape targets for pushed metrics and for the Collector's own metrics."""
    own = [f"127.0.0.1:{port}" for port in (ports.collector_metrics, ports.collector_telemetry)]
    return json.dumps([] if small else [{"targets": own}])


def jaeger_ui_config(grafana: int) -> str:
    """Return `jaeger/ui.json`, with links to Grafana at its port."""
    template = (shipped() / "jaeger" / "ui.json").read_text()
    return template.replace(f"//localhost:{Ports.grafana}/", f"//localhost:{grafana}/")
