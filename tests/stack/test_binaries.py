"""Test finding and building servers: by version, and completely or not at all."""

import re
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.server_binaries import built

from tools import backends
from tools.backends import BuildError, ensure
from torchotel.stack.binaries import BACKENDS, COLLECTOR, JAEGER, PROMETHEUS, Backend, find_all
from torchotel.stack.services import StackError

SAYS_ITS_VERSION = {"jaeger": "version", "otelcol": "--version", "prometheus": "--version", "promtool": "--version"}


@pytest.fixture
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHOTEL_BACKENDS", str(tmp_path))


def build(work: Path, made: Path) -> None:
    """Build, and leave an intermediate file."""
    (work / "go.mod").write_text("module backend\n")
    (made / "server").write_text("built")


def fail(work: Path, made: Path) -> None:
    """Fail in the middle of a build."""
    build(work, made)
    raise BuildError("no")


@pytest.mark.usefixtures("_own_cache")
def test_a_server_is_built_once_and_found_by_its_version(tmp_path: Path) -> None:
    """Each version is built once; only binaries and the lock file remain."""
    said: list[str] = []
    first = ensure(Backend("server", "1.0", ("server",)), build, said.append)
    assert first == tmp_path / "server-1.0" / "server"
    assert len(said) == 2
    assert ensure(Backend("server", "1.0", ("server",)), fail, said.append) == first
    assert len(said) == 2
    assert ensure(Backend("server", "1.1", ("server",)), build, said.append) != first
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()) == [
        ".server-1.0.lock",
        ".server-1.1.lock",
        "server-1.0/server",
        "server-1.1/server",
    ]


@pytest.mark.usefixtures("_own_cache")
def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no"):
        ensure(Backend("server", "1.0", ("server",)), fail, lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == [".server-1.0.lock"]


@pytest.mark.usefixtures("_own_cache")
def test_two_who_miss_a_server_build_it_once() -> None:
    """Of two concurrent builds, the second waits and uses the first one's binaries, which may be running."""
    both, builds = threading.Barrier(2), []

    def say(text: str) -> None:
        if text.startswith("building"):
            both.wait()

    def counted(work: Path, made: Path) -> None:
        builds.append(made)
        build(work, made)

    backend = Backend("server", "1.0", ("server",))
    with ThreadPoolExecutor(2) as pool:
        assert set(pool.map(lambda _: ensure(backend, counted, say), range(2))) == {backend.binary()}
    assert len(builds) == 1


@pytest.mark.usefixtures("_own_cache")
def test_without_go_all_that_is_missing_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Go, the message names all missing servers, and the release binaries to use instead."""
    PROMETHEUS.folder.mkdir()
    PROMETHEUS.binary().touch()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError) as raised:
        backends.build_all()
    first, *servers, last = str(raised.value).splitlines()
    assert first == "these servers are missing, and Go is not installed to build them:"
    files = ("binary jaeger", "binary otelcol-contrib, renamed otelcol,", "binaries prometheus and promtool")
    assert [line.partition(" from ")[0] for line in servers] == [
        f"  {backend.name} {backend.version}: copy the {named}"
        for backend, named in zip((JAEGER, COLLECTOR, PROMETHEUS), files, strict=True)
    ]
    assert [line.rpartition(" to ")[2] for line in servers] == [
        str(tmp_path / backend.folder.name) for backend in (JAEGER, COLLECTOR, PROMETHEUS)
    ]
    assert last.startswith("Install Go")


@pytest.mark.usefixtures("_own_cache")
def test_a_server_is_found_in_the_cache_and_then_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server is found in the cache, then on PATH; a file that is not executable is not found."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    on_path = tmp_path / "bin" / COLLECTOR.on_path
    for file in (on_path, COLLECTOR.binary()):
        file.parent.mkdir()
        file.touch()
        with pytest.raises(StackError):
            find_all([COLLECTOR] if file is on_path else [JAEGER])
        file.chmod(0o700)
        assert find_all([COLLECTOR]) == {COLLECTOR: file}


@pytest.mark.skipif(shutil.which("go") is None, reason="there is no go on the path")
def test_a_build_that_fails_says_what_go_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOPROXY", "off")
    builder = backends.module_builder("example.com/nothing", "v1.0.0", {"nothing": "."})
    with pytest.raises(BuildError, match=r"go mod download -json example.com/nothing@v1.0.0 failed:\n.*"):
        builder(tmp_path, tmp_path)


def test_the_collector_is_built_of_components_of_its_own_version() -> None:
    """The Collector's components have its version; its config providers have another version scheme."""
    manifest = Path(backends.__file__).with_name("collector.yaml").read_text()
    versions = {version for path, version in re.findall(r"gomod: (\S+) v(\S+)", manifest) if "/provider/" not in path}
    assert versions == {COLLECTOR.version}
    assert f"  version: {COLLECTOR.version}\n" in manifest


@pytest.mark.real_server
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_what_is_in_the_cache_is_that_version(backend: Backend) -> None:
    for name in backend.binaries:
        words = [str(built(backend, name)), SAYS_ITS_VERSION[name]]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert backend.version in done.stdout + done.stderr
