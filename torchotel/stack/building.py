"""Servers built from their Go modules, at a version, without a checkout of their sources."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path

from torchotel.stack.errors import StackError

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
