"""Test the doctor's checks of this machine: versions, ports, folders, clocks and providers."""

import os
import re
import socket
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from support import commands

from torchotel.config.config import Config
from torchotel.doctor import clock, local, versions
from torchotel.doctor.result import Finding, Level


def test_tells_the_versions_that_are_installed() -> None:
    (found,) = versions.check()
    assert found.level is Level.OK
    assert f"torch {metadata.version('torch')}, OpenTelemetry {metadata.version('opentelemetry-sdk')}" in found.text


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder whose distributions precede the installed ones, as in a broken environment."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def install(site: Path, name: str, version: str, *needs: str) -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {need}" for need in needs)]
    (folder / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines, "", ""]))


@pytest.mark.parametrize(("version", "findings"), [("2.13.1", 1), ("2.14.0", 0), ("2.15.0+cu130", 0)])
def test_versions_of_torch_without_collectives(site: Path, version: str, findings: int) -> None:
    install(site, "torch", version)
    texts = [found.text for found in versions.check()]
    assert sum(text.startswith(f"torch {version} does not show its collectives") for text in texts) == findings


@pytest.mark.parametrize(
    ("name", "version", "text", "needed"),
    [
        ("torch", "2.3.1+cu121", "torch is 2.3.1+cu121, supported is >=2.9.0a0", "torch>=2.9.0a0"),
        ("prometheus-client", "0.9", "prometheus-client is 0.9, supported is >=0.20", "prometheus-client>=0.20"),
        ("opentelemetry-sdk", "1.20.0", "opentelemetry-sdk is 1.20.0, supported is >=1.35", "opentelemetry-sdk"),
        ("opentelemetry-sdk", "2.0.0", "opentelemetry-sdk is 2.0.0, supported is <2", "opentelemetry-sdk"),
        ("opentelemetry-sdk", "2.0.0rc1", "opentelemetry-sdk is 2.0.0rc1, supported is <2", "opentelemetry-sdk"),
    ],
)
def test_knows_what_is_not_supported(site: Path, name: str, version: str, text: str, needed: str) -> None:
    """An unsupported version is reported with advice to install that package, not another torchotel."""
    install(site, name, version)
    found = next(versions.check())
    assert (found.level, found.text) == (Level.FAILED, text)
    assert found.advice.startswith(f"pip install '{needed}")


def test_knows_packages_of_several_releases(site: Path) -> None:
    ours = metadata.version("opentelemetry-sdk")
    install(site, "opentelemetry-api", "1.36.0")
    (found,) = versions.check()
    assert found.level is Level.FAILED
    assert f"opentelemetry-sdk needs opentelemetry-api=={ours}, which is 1.36.0" in found.text
    assert "pip install --upgrade opentelemetry-" in found.advice


def test_accepts_the_torch_of_nvidias_containers(site: Path) -> None:
    install(site, "torch", "2.9.0a0+145a3a7bda.nv25.10")
    found = next(versions.check())  # the second one says that this torch shows no collectives
    assert found.level is Level.OK


def test_ignores_requirements_for_other_platforms(site: Path) -> None:
    """Requirements with environment markers for other platforms are ignored."""
    install(site, "opentelemetry-extra", "1.0", 'opentelemetry-sdk<1; sys_platform == "none"')
    (found,) = versions.check()
    assert found.level is Level.OK


def prometheus(**environ: str) -> list[Finding]:
    return list(local.check_port(Config.read({}, environ), environ))


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_tells_who_has_a_port(taken: int) -> None:
    (found,) = prometheus(OTEL_EXPORTER_PROMETHEUS_PORT=str(taken))
    assert found.level is Level.WARNING
    assert found.text.startswith(f"port {taken} of 127.0.0.1 is taken by ")
    if Path("/proc/net/tcp").exists():
        assert f"process {os.getpid()} (" in found.text
    assert "To choose another, set OTEL_EXPORTER_PROMETHEUS_PORT" in found.advice


def test_looks_at_the_port_of_the_local_rank(taken: int) -> None:
    (found,) = prometheus(OTEL_EXPORTER_PROMETHEUS_PORT=str(taken - 2), RANK="2", WORLD_SIZE="4", LOCAL_RANK="2")
    assert found.level is Level.WARNING


def test_leaves_a_free_port_free() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    for _ in range(2):
        (found,) = prometheus(OTEL_EXPORTER_PROMETHEUS_PORT=str(port))
        assert (found.level, found.text) == (Level.OK, f"port {port} is free on 127.0.0.1")


def test_points_out_an_address_that_others_reach() -> None:
    everybody = "0.0.0.0"  # noqa: S104 - the check warns of this address
    free, found = prometheus(OTEL_EXPORTER_PROMETHEUS_PORT="0", OTEL_EXPORTER_PROMETHEUS_HOST=everybody)
    assert free.level is Level.OK
    assert found.level is Level.WARNING
    assert "served on 0.0.0.0 to every client" in found.text


def test_tells_an_address_of_another_machine() -> None:
    found, _ = local.check_port(Config(prometheus_port=0, prometheus_host="192.0.2.1"), {})
    assert found.level is Level.FAILED
    assert "cannot listen on 192.0.2.1" in found.text


def folder(path: Path, **environ: str) -> Finding:
    (found,) = local.check_folders(Config(record=path), environ)
    return found


def test_writes_to_the_run_folder_and_leaves_nothing(tmp_path: Path) -> None:
    found = folder(tmp_path / "runs" / "one")
    assert re.fullmatch(rf"record {tmp_path}/runs/one can be written to, [\d,]+ MiB are free", found.text)
    assert list(tmp_path.iterdir()) == []


def test_tells_a_folder_that_holds_a_run(tmp_path: Path) -> None:
    """A folder that holds a run is reported; each rank has its own folder."""
    (tmp_path / "run" / "rank1").mkdir(parents=True)
    (tmp_path / "run" / "rank1" / "metrics.jsonl").touch()
    assert folder(tmp_path / "run", RANK="0", WORLD_SIZE="2").level is Level.OK
    found = folder(tmp_path / "run", RANK="1", WORLD_SIZE="2")
    assert found.level is Level.OK
    assert "holds a run already; the next run is recorded beside it" in found.text


def test_tells_a_folder_that_cannot_be_written_to() -> None:
    found = folder(Path(os.devnull) / "run")
    assert found.level is Level.FAILED
    assert "cannot be written to: Not a directory" in found.text


@pytest.mark.parametrize(
    ("hours", "level", "text"),
    [(0, Level.OK, "within a second of the endpoint's"), (2, Level.WARNING, "behind"), (-2, Level.WARNING, "ahead of")],
)
def test_compares_clocks(hours: int, level: Level, text: str) -> None:
    now_s = time.time()
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(now_s + hours * 3600))
    found = clock.compare_with_server(date, now_s, now_s)
    assert found is not None
    assert found.level is level
    assert text in found.text


def test_takes_no_word_from_an_answer_without_a_date() -> None:
    assert clock.compare_with_server(None, 0.0, 0.0) is None
    assert clock.compare_with_server("yesterday", 0.0, 0.0) is None


def test_forgives_a_second_that_a_date_leaves_out() -> None:
    found = clock.compare_with_server("Thu, 01 Jan 1970 00:00:09 GMT", 10.9, 10.95)
    assert found is not None
    assert found.level is Level.OK


PROVIDER = """
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import set_tracer_provider
from torchotel.config.config import Config
from torchotel.doctor.otel_environment import check_providers
for told in (check_providers(Config()), check_providers(Config(set_global_provider=True))):
    print(*(finding.text for finding in told))
set_tracer_provider(TracerProvider())
print(*(finding.text for finding in check_providers(Config())))
"""


@pytest.mark.program
def test_tells_whose_spans_are_recorded(tmp_path: Path) -> None:
    done = commands.python("-c", PROVIDER, cwd=tmp_path)
    none, ours, given = done.stdout.splitlines()
    assert "spans of the program are not recorded, unless it sets a TracerProvider" in none
    assert "set_global_provider" in ours
    assert given == "a TracerProvider is set globally (opentelemetry.sdk.trace.TracerProvider)"


@pytest.mark.parametrize(
    ("settings", "level", "text"),
    [
        ({}, Level.OK, "a companion process"),
        ({"traces_exporter": "console"}, Level.OK, "exports the spans: the console exporter"),
        ({"worker": "thread"}, Level.OK, "exports the spans: worker=thread"),
        ({"worker": "process"}, Level.OK, "a companion process"),
        ({"worker": "process", "traces_exporter": "console"}, Level.WARNING, "worker=process is ignored: the console"),
    ],
)
def test_names_the_worker(settings: dict[str, str], level: Level, text: str) -> None:
    (found,) = local.check_worker(Config.read(settings, {}))
    assert found.level is level
    assert text in found.text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "detail takes at most 1 % of step time; each step has a fixed cost"),
        ({"overhead_budget": 0.002}, "detail takes at most 0.2 % of step time; each step has a fixed cost"),
        (
            {"detail": 16},
            "one step in 16 is detailed, and overhead_budget does not apply; each step has a fixed cost",
        ),
        ({"detail": "all"}, "every step is detailed, and overhead_budget does not apply; each step has a fixed cost"),
        ({"detail": "off"}, "no step is detailed; each step has a fixed cost"),
    ],
)
def test_states_the_fixed_cost_beside_the_budget(settings: dict[str, object], text: str) -> None:
    (found,) = local.check_overhead(Config.read(settings, {}))
    assert (found.level, found.subject) == (Level.OK, "overhead")
    assert found.text == f"{text} of 0.12 to 0.25 ms, which is 1.2 to 2.5 % of a step of 10 ms"
