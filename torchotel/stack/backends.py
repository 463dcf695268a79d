"""The real servers as binaries: found in a cache by their version, or built there once.

Building takes Go, its module proxy and minutes, and no container engine.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from torchotel._config import BACKENDS_VARIABLE
from torchotel.stack.building import collector_builder, module_builder
from torchotel.stack.errors import StackError


@dataclass(frozen=True)
class Backend:
    """One server, at the version that everything here is tested with."""

    name: str
    version: str
    binaries: tuple[str, ...]
    """The first one is the server."""
    build: Callable[[Path, Path], None]
    """Builds them into the second folder; the first is a place to work in."""
    released: str = ""
    """The binaries of a release that can be used instead, with the address of the releases."""

    @property
    def folder(self) -> Path:
        """Where its binaries are kept."""
        return cache() / f"{self.name}-{self.version}"

    @property
    def is_there(self) -> bool:
        """Whether all its binaries are."""
        return all(self.binary(name).is_file() for name in self.binaries)

    @property
    def advice(self) -> str:
        """Return the instruction to use the binaries of a release."""
        return f"copy {self.released} to {self.folder}"

    def binary(self, name: str | None = None) -> Path:
        """Give the path of a binary, the server's if none is named."""
        return self.folder / (name or self.binaries[0])


JAEGER = Backend(
    "jaeger",
    "2.13.0",
    ("jaeger",),
    # The last tag of v1 is v2.13.0 too: later ones can't be had as modules, since their path has no /v2.
    module_builder(
        "github.com/jaegertracing/jaeger",
        "v1.76.0",
        {"jaeger": "cmd/jaeger"},
        says=("github.com/jaegertracing/jaeger/internal/version.latestVersion", "v2.13.0"),
    ),
    "the binary jaeger from https://github.com/jaegertracing/jaeger/releases",
)
COLLECTOR = Backend(
    "otelcol",
    "0.155.0",
    ("otelcol",),
    collector_builder("0.155.0"),
    "the binary otelcol-contrib, renamed otelcol, "
    "from https://github.com/open-telemetry/opentelemetry-collector-releases/releases",
)
PROMETHEUS = Backend(
    "prometheus",
    "3.15.0",
    ("prometheus", "promtool"),
    module_builder(
        "github.com/prometheus/prometheus",
        "v0.315.0",
        {"prometheus": "cmd/prometheus", "promtool": "cmd/promtool"},
        says=("github.com/prometheus/common/version.Version", "3.15.0"),
        # Targets come from files or from Kubernetes; the clients of two dozen clouds are most of the build.
        tags="remove_all_sd,enable_kubernetes_sd",
    ),
    "the binaries prometheus and promtool from https://github.com/prometheus/prometheus/releases",
)
BACKENDS = (JAEGER, COLLECTOR, PROMETHEUS)


def cache() -> Path:
    """Give the folder that outlives a checkout: TORCHOTEL_BACKENDS, else one in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(BACKENDS_VARIABLE) or Path(home) / "torchotel" / "backends")


def check_can_build(wanted: Iterable[Backend]) -> None:
    """Look whether those that are not there can be built.

    Raises:
        StackError: Go is missing; it names all that is.
    """
    missing = [backend for backend in wanted if not backend.is_there]
    if missing and shutil.which("go") is None:
        raise StackError(
            "\n".join(
                [
                    "these servers are missing, and Go is not installed to build them:",
                    *(f"  {one.name} {one.version}: {one.advice}" for one in missing),
                    "Install Go 1.25 or later (https://go.dev/dl), or copy the binaries of the releases.",
                ]
            )
        )


def ensure(backend: Backend, say: Callable[[str], None] = print) -> Path:
    """Build a server if it is not there, and give its binary's path.

    Raises:
        StackError: Go is missing, or the build failed.
    """
    if not backend.is_there:
        check_can_build([backend])
        say(f"building {backend.name} {backend.version} with Go; this takes some minutes, once")
        _build(backend)
        say(f"built {backend.name} {backend.version} in {backend.folder}")
    return backend.binary()


def _build(backend: Backend) -> None:
    """Put the binaries in their place, whole or not at all, unless another process has done so meanwhile."""
    work = backend.folder.with_name(f".{backend.folder.name}")
    work.parent.mkdir(parents=True, exist_ok=True)
    with work.with_name(f"{work.name}.lock").open("w") as lock:  # it stays: who waits for it has it open
        fcntl.flock(lock, fcntl.LOCK_EX)
        if backend.is_there:
            return
        shutil.rmtree(work, ignore_errors=True)  # of one that was killed
        made = work / "bin"
        made.mkdir(parents=True)
        try:
            backend.build(work, made)
            shutil.rmtree(backend.folder, ignore_errors=True)
            made.rename(backend.folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def main() -> int:
    """Build all that is missing; `make backends` calls it."""
    try:
        check_can_build(BACKENDS)
        for backend in BACKENDS:
            print(ensure(backend, lambda text: print(text, flush=True)))  # noqa: T201 - it is a command
    except StackError as error:
        print(error, file=sys.stderr)  # noqa: T201 - it is a command
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
