"""Find the binaries of the servers that `torchotel stack up --native` runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torchotel.config.config import BACKENDS_VARIABLE
from torchotel.stack.services import StackError


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
