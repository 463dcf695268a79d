"""Builds Jaeger, the Collector and Prometheus with Go into the cache; `make backends` calls it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from torchotel.stack.binaries import COLLECTOR, JAEGER, PROMETHEUS, Backend

Builder = Callable[[Path, Path], None]
"""Builds binaries into the second folder; the first one is for intermediate files."""
_SMALL = "-ldflags=-s -w"
_MOST_SAID = 3000
"""Characters of the end of a failed build's output."""
_LOCAL_REPLACE = re.compile(r"^replace .*=> \.\.?/.*$|^\t\S+ => \.\.?/.*$", re.MULTILINE)


class BuildError(RuntimeError):
    """A backend cannot be built."""


def module_builder(
    module: str, version: str, packages: Mapping[str, str], *, says: tuple[str, str] | None = None, tags: str = ""
) -> Builder:
    """Return a builder of the packages of a Go module.

    Args:
        module: The module.
        version: Its version.
        packages: Packages by the names of their binaries.
        says: The variable that holds the version which the binaries print, and that version.
        tags: Build tags.
    """
    stamp = f" -X {says[0]}={says[1]}" if says else ""

    def build(work: Path, made: Path) -> None:
        _repeat_module(work, module, version)
        for name, package in packages.items():
            flags = (f"{_SMALL}{stamp}", f"-tags={tags}")
            go(work, "build", "-trimpath", *flags, "-o", str(made / name), f"{module}/{package}")

    return build


def collector_builder(version: str) -> Builder:
    """Return a builder of a Collector with the components that the configurations in `deploy/` name."""

    def build(work: Path, made: Path) -> None:
        manifest = Path(__file__).with_name("collector.yaml").read_text()
        (work / "collector.yaml").write_text(manifest.replace("OUTPUT", str(work / "sources")))
        builder = f"go.opentelemetry.io/collector/cmd/builder@v{version}"
        go(work, "install", builder, GOBIN=str(work), GOFLAGS="-buildvcs=false")
        # Without this option it tidies the module, which needs the test dependencies of every component.
        _call(work, str(work / "builder"), "--config=collector.yaml", "--skip-get-modules", "--skip-compilation")
        (work / "sources" / "go.mod").write_text(_module_of(manifest, version))
        go(work / "sources", "build", "-trimpath", _SMALL, "-o", str(made / "otelcol"), ".")

    return build


def _module_of(manifest: str, version: str) -> str:
    required = [f"go.opentelemetry.io/collector/otelcol v{version}", *re.findall(r"gomod: (.+)", manifest)]
    return "\n".join(["module otelcol", "go 1.25.0", *(f"require {one}" for one in required)])


def go(folder: Path, *words: str, **environ: str) -> str:
    """Run Go and return its output; without cgo, so that the binaries run in an empty container too."""
    return _call(folder, "go", *words, CGO_ENABLED="0", **{"GOFLAGS": "-buildvcs=false -mod=mod", **environ})


def _call(folder: Path, *words: str, **environ: str) -> str:
    done = subprocess.run(  # noqa: S603  # runs the commands of the builders
        words, cwd=folder, env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BuildError(f"{' '.join(words)} failed:\n{done.stderr[-_MOST_SAID:]}")
    return done.stdout


def _repeat_module(work: Path, module: str, version: str) -> None:
    """Write a main module with the requirements, replacements and exclusions of another module.

    Go ignores replacements and exclusions outside of the main module.
    """
    (work / "go.mod").write_text("module backend\n")
    found = json.loads(go(work, "mod", "download", "-json", f"{module}@{version}"))
    theirs = Path(found["GoMod"]).read_text()
    # Its checksums are copied, because the checksum database does not have all of them.
    (work / "go.sum").write_bytes(Path(found["Dir"], "go.sum").read_bytes())
    ours = re.sub(r"^module .*$", "module backend", theirs, count=1, flags=re.MULTILINE)
    (work / "go.mod").write_text(f"{_LOCAL_REPLACE.sub('', ours)}\nrequire {module} {version}\n")


BUILDERS: Mapping[Backend, Builder] = {
    JAEGER: module_builder(
        "github.com/jaegertracing/jaeger",
        # The last tag of v1 is the commit of v2.13.0; later versions are not valid modules: their path has no /v2.
        "v1.76.0",
        {"jaeger": "cmd/jaeger"},
        says=("github.com/jaegertracing/jaeger/internal/version.latestVersion", f"v{JAEGER.version}"),
    ),
    COLLECTOR: collector_builder(COLLECTOR.version),
    PROMETHEUS: module_builder(
        "github.com/prometheus/prometheus",
        "v0.315.0",
        {"prometheus": "cmd/prometheus", "promtool": "cmd/promtool"},
        says=("github.com/prometheus/common/version.Version", PROMETHEUS.version),
        # Only file and Kubernetes discovery are needed; the clients of two dozen clouds are most of the build.
        tags="remove_all_sd,enable_kubernetes_sd",
    ),
}


def build_all() -> None:
    """Build every backend that the cache lacks.

    Raises:
        BuildError: Go is missing, or a build failed.
    """
    _check_go(BUILDERS)
    for backend, build in BUILDERS.items():
        print(ensure(backend, build, lambda text: print(text, flush=True)))  # noqa: T201  # a command's output


def _check_go(wanted: Iterable[Backend]) -> None:
    """Raise BuildError with the names of all backends that the cache lacks, if there is no Go to build them."""
    missing = [backend for backend in wanted if not backend.is_complete]
    if missing and shutil.which("go") is None:
        raise BuildError(
            "\n".join(
                [
                    "these servers are missing, and Go is not installed to build them:",
                    *(f"  {one.name} {one.version}: {one.advice}" for one in missing),
                    "Install Go 1.25 or later (https://go.dev/dl), or copy the binaries of the releases.",
                ]
            )
        )


def ensure(backend: Backend, build: Builder, say: Callable[[str], None] = print) -> Path:
    """Build a backend if the cache lacks it, and return the path of its server.

    Raises:
        BuildError: Go is missing, or the build failed.
    """
    if not backend.is_complete:
        _check_go([backend])
        say(f"building {backend.name} {backend.version} with Go; this takes some minutes, once")
        _build(backend, build)
        say(f"built {backend.name} {backend.version} in {backend.folder}")
    return backend.binary()


def _build(backend: Backend, build: Builder) -> None:
    """Put all binaries into the cache or none. Do nothing if another process has built them meanwhile."""
    work = backend.folder.with_name(f".{backend.folder.name}")
    work.parent.mkdir(parents=True, exist_ok=True)
    with work.with_name(f"{work.name}.lock").open("w") as lock:  # never deleted: a waiting process has it open
        fcntl.flock(lock, fcntl.LOCK_EX)
        if backend.is_complete:
            return
        shutil.rmtree(work, ignore_errors=True)  # remains of a killed build
        made = work / "bin"
        made.mkdir(parents=True)
        try:
            build(work, made)
            shutil.rmtree(backend.folder, ignore_errors=True)
            made.rename(backend.folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
