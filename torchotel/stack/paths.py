"""Folders, binaries and generated configuration files of the stack."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torchotel._utils.installation import own_targets, stack_folder
from torchotel.config.config import BACKENDS_VARIABLE
from torchotel.stack.services import Ports, StackError


@dataclass(frozen=True)
class Backend:
    """One server, at the version that torchotel is tested with."""

    name: str
    version: str
    binaries: tuple[str, ...]
    """File names in the cache folder; the first one is the server."""
    on_path: str = ""
    """Name of the server on PATH."""
    releases: str = ""
    """Instruction to copy the binary of a release, with the address of the releases."""

    @property
    def folder(self) -> Path:
        """The folder of its binaries in the cache."""
        return cache() / f"{self.name}-{self.version}"

    @property
    def is_complete(self) -> bool:
        """Whether the cache has all its binaries."""
        return all(self.binary(name).is_file() for name in self.binaries)

    @property
    def advice(self) -> str:
        """Return the instruction to use the binary of a release."""
        return f"copy {self.releases} to {self.folder}"

    def binary(self, name: str | None = None) -> Path:
        """Return the path of a binary in the cache, by default of the server."""
        return self.folder / (name or self.binaries[0])

    def find(self) -> Path | None:
        """Return the server's binary from the cache, else from PATH; None if neither has an executable one."""
        found = shutil.which(self.binary()) or (self.on_path and shutil.which(self.on_path))
        return Path(found) if found else None


JAEGER = Backend(
    "jaeger", "2.13.0", ("jaeger",), "jaeger", "the binary jaeger from https://github.com/jaegertracing/jaeger/releases"
)
COLLECTOR = Backend(
    "otelcol",
    "0.155.0",
    ("otelcol",),
    "otelcol-contrib",  # the distribution otelcol lacks components that the configuration names
    "the binary otelcol-contrib, renamed otelcol, "
    "from https://github.com/open-telemetry/opentelemetry-collector-releases/releases",
)
PROMETHEUS = Backend(
    "prometheus",
    "3.15.0",
    ("prometheus", "promtool"),
    "prometheus",
    "the binaries prometheus and promtool from https://github.com/prometheus/prometheus/releases",
)
BACKENDS = (JAEGER, COLLECTOR, PROMETHEUS)


def cache() -> Path:
    """Return the folder of the binaries: TORCHOTEL_BACKENDS, by default ~/.cache/torchotel/backends."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(BACKENDS_VARIABLE) or Path(home) / "torchotel" / "backends")


def find_all(backends: Iterable[Backend]) -> dict[Backend, Path]:
    """Return the servers' binaries.

    Raises:
        StackError: Binaries are missing; the message names all of them.
    """
    found = {backend: backend.find() for backend in backends}
    missing = [backend for backend, path in found.items() if path is None]
    if missing:
        raise StackError(
            "\n".join(
                [
                    "these servers were not found, so nothing was started:",
                    *(f"  {server.name} {server.version}: {server.advice}" for server in missing),
                    "Then run this command again.",
                ]
            )
        )
    return {backend: path for backend, path in found.items() if path is not None}


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
