"""Find or build the servers of the stack."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from torchotel.config.config import BACKENDS_VARIABLE
from torchotel.stack.services import StackError

_SMALL = "-ldflags=-s -w"
_MOST_SAID = 3000
"""Characters of a failed build's last words."""
_LOCAL_REPLACE = re.compile(r"^replace .*=> \.\.?/.*$|^\t\S+ => \.\.?/.*$", re.MULTILINE)


def module_builder(
    module: str, version: str, packages: Mapping[str, str], *, says: tuple[str, str] | None = None, tags: str = ""
) -> Callable[[Path, Path], None]:
    """Give what builds packages of a module out of one folder into another.

    Args:
        module: The module.
        version: Its version.
        packages: By the names of their binaries.
        says: The variable that holds the version which they tell, and that version.
        tags: Build tags.
    """
    stamp = f" -X {says[0]}={says[1]}" if says else ""

    def build(work: Path, made: Path) -> None:
        _repeat_module(work, module, version)
        for name, package in packages.items():
            flags = (f"{_SMALL}{stamp}", f"-tags={tags}")
            go(work, "build", "-trimpath", *flags, "-o", str(made / name), f"{module}/{package}")

    return build


def collector_builder(version: str) -> Callable[[Path, Path], None]:
    """Give what builds a Collector of just the components that the configurations in `deploy/` name."""

    def build(work: Path, made: Path) -> None:
        manifest = resources.files("torchotel.stack").joinpath("collector.yaml").read_text()
        (work / "collector.yaml").write_text(manifest.replace("OUTPUT", str(work / "sources")))
        builder = f"go.opentelemetry.io/collector/cmd/builder@v{version}"
        go(work, "install", builder, GOBIN=str(work), GOFLAGS="-buildvcs=false")
        # Without this it tidies the module too, and needs what the tests of every component need.
        _call(work, str(work / "builder"), "--config=collector.yaml", "--skip-get-modules", "--skip-compilation")
        (work / "sources" / "go.mod").write_text(_module_of(manifest, version))
        go(work / "sources", "build", "-trimpath", _SMALL, "-o", str(made / "otelcol"), ".")

    return build


def _module_of(manifest: str, version: str) -> str:
    required = [f"go.opentelemetry.io/collector/otelcol v{version}", *re.findall(r"gomod: (.+)", manifest)]
    return "\n".join(["module otelcol", "go 1.25.0", *(f"require {one}" for one in required)])


def go(folder: Path, *words: str, **environ: str) -> str:
    """Run Go and give what it prints; without C, so that what it builds runs in an empty container too."""
    return _call(folder, "go", *words, CGO_ENABLED="0", **{"GOFLAGS": "-buildvcs=false -mod=mod", **environ})


def _call(folder: Path, *words: str, **environ: str) -> str:
    done = subprocess.run(  # noqa: S603 - what is run is said above
        words, cwd=folder, env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise StackError(f"{' '.join(words)} failed:\n{done.stderr[-_MOST_SAID:]}")
    return done.stdout


def _repeat_module(work: Path, module: str, version: str) -> None:
    """Make a module that requires, replaces and excludes what another does: Go obeys these in the main module only."""
    (work / "go.mod").write_text("module backend\n")
    found = json.loads(go(work, "mod", "download", "-json", f"{module}@{version}"))
    theirs = Path(found["GoMod"]).read_text()
    # Its checksums come along: not every one of them is to be had from the database of checksums.
    (work / "go.sum").write_bytes(Path(found["Dir"], "go.sum").read_bytes())
    ours = re.sub(r"^module .*$", "module backend", theirs, count=1, flags=re.MULTILINE)
    (work / "go.mod").write_text(f"{_LOCAL_REPLACE.sub('', ours)}\nrequire {module} {version}\n")


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
