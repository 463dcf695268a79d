"""The scrape endpoint: its port, its registry, its target file, and what a fork makes of them."""

import json
import logging
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, generate_latest
from support.commands import environment, forked_python
from support.otlp_http_receiver import Answer, receiver
from support.prometheus_server import until
from support.scraped_metrics import OPENMETRICS, scrape, value
from torch import nn

import torchotel
from torchotel._types import ConfigError
from torchotel.exporters.prometheus.endpoint import DiscoveryFile
from torchotel.exporters.prometheus.exposition import target_labels


def train(steps: int = 1) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def is_listening(port: int | None) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port or 0)) == 0


def test_a_taken_port_costs_a_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Another one is bound, and the target file says which."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with torchotel.instrument(
            service_name="digits", prometheus_port=taken, traces_exporter="none", discovery_dir=tmp_path
        ) as handle:
            assert handle.prometheus_port not in {taken, None}
            assert value(scrape(handle.prometheus_port).series, "torch_steps_total") == 0
            (target,) = json.loads(next(tmp_path.iterdir()).read_text())
            assert target == {"targets": [f"127.0.0.1:{handle.prometheus_port}"], "labels": {"job": "digits"}}
    assert [str(taken) in record.getMessage() for record in caplog.records if "taken" in record.getMessage()] == [True]


def test_each_local_rank_has_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The local rank is added to the port that was asked for."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        free = other.getsockname()[1]
    for name, text in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, text)
    with torchotel.instrument(prometheus_port=free - 1, traces_exporter="none") as handle:
        assert handle.prometheus_port == free


def test_nothing_stays_behind(tmp_path: Path) -> None:
    """`shutdown` closes the port, ends the threads, cuts off who is connected, and takes the target back."""
    folder = tmp_path / "made" / "here"
    handle = torchotel.instrument(traces_exporter="none", discovery_dir=folder)
    port = handle.prometheus_port
    assert len(list(folder.iterdir())) == 1
    with socket.create_connection(("127.0.0.1", port or 0)) as silent:
        assert scrape(port).series  # one client that says nothing keeps nobody else waiting
        handle.shutdown()
        silent.settimeout(5)
        assert silent.recv(1) == b""
    assert not is_listening(port)
    assert not list(folder.iterdir())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("torchotel")]


def test_the_stack_of_this_user_finds_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one was up, its folder is the default; where none was, nothing is made."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with torchotel.instrument(traces_exporter="none"):
        assert list(tmp_path.iterdir()) == []
    folder, own = tmp_path / "torchotel" / "stack" / "targets", tmp_path / "own"
    folder.mkdir(parents=True)
    with torchotel.instrument(traces_exporter="none") as handle:
        (target,) = folder.iterdir()
        assert json.loads(target.read_text())[0]["targets"] == [f"127.0.0.1:{handle.prometheus_port}"]
    with torchotel.instrument(traces_exporter="none", discovery_dir=own):
        assert (list(folder.iterdir()), len(list(own.iterdir()))) == ([], 1)


@pytest.mark.program
@pytest.mark.parametrize(("end", "left"), [("", 0), ("1 / 0", 1), ("os._exit(0)", 1)])
@pytest.mark.parametrize("worker", ["thread", "process"])
def test_the_target_of_a_run_that_died_stays(worker: str, end: str, left: int, tmp_path: Path) -> None:
    """Prometheus sees it down then, until a process of this host has the same port and takes it back."""
    lines = (
        "import os, torch, torchotel",
        f"settings = {{'worker': {worker!r}, 'traces_exporter': 'none', 'discovery_dir': {str(tmp_path)!r}}}",
        "handle = torchotel.instrument(**settings)",
        "model = torch.nn.Linear(2, 2)",
        "model(torch.ones(1, 2)).sum().backward()",
        "torch.optim.SGD(model.parameters(), lr=0.1).step()",
        "handle.flush()",
        "print(handle.prometheus_port)",
        "import sys; sys.stdout.flush()",
        end,
    )
    ended = forked_python("-c", "\n".join(lines), cwd=tmp_path.parent)
    found = list(tmp_path.iterdir())
    assert len(found) == left, ended.stderr
    until(lambda: is_listening(int(ended.stdout)), lambda listening: not listening)  # a companion ends a moment later
    with torchotel.instrument(prometheus_port=int(ended.stdout), traces_exporter="none", discovery_dir=tmp_path):
        assert len(list(tmp_path.iterdir())) == 1
        assert not any(path.exists() for path in found)
    assert not list(tmp_path.iterdir())


def nest(path: Path, _: str) -> None:
    path.write_text("[" * 200_000)


def make_sparse(path: Path, content: str) -> None:
    path.write_text(content)
    os.truncate(path, 3 * 1024**3)


def give_away(path: Path, content: str) -> None:
    path.write_text(content)
    os.chown(path, 12345, 12345)


def make_pipe(path: Path, _: str) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    "spoil",
    [
        nest,
        make_sparse,
        make_pipe,
        pytest.param(
            give_away, marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
        ),
    ],
)
def test_hostile_target_files_are_ignored(
    spoil: Callable[[Path, str], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file of another program in the shared folder costs no telemetry, no memory, and is left there."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        free = other.getsockname()[1]
    hostile = tmp_path / f"torchotel-{socket.gethostname()}-evil.json"
    spoil(hostile, json.dumps([{"targets": [f"127.0.0.1:{free}"], "labels": {}}]))
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torchotel.instrument(prometheus_port=free, traces_exporter="none", discovery_dir=tmp_path) as handle:
        assert handle.prometheus_port == free
        train()
        handle.flush()
        assert value(scrape(free).series, "torch_steps_total") == 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before < 1024**2  # in KiB
    assert list(tmp_path.iterdir()) == [hostile]
    assert not [record.getMessage() for record in caplog.records if record.levelname != "INFO"]


@pytest.mark.parametrize(
    "settings", [{"metrics_exporter": "none"}, {"prometheus_port": None}, {"prometheus_registry": CollectorRegistry()}]
)
def test_no_server_where_none_is_wanted(settings: dict[str, object], tmp_path: Path) -> None:
    """Then there is no port and no target."""
    with torchotel.instrument(traces_exporter="none", discovery_dir=tmp_path, **settings) as handle:  # type: ignore[arg-type]  # one setting each
        assert handle.prometheus_port is None
        assert not [thread for thread in threading.enumerate() if thread.name == "torchotel-scrape"]
        assert not list(tmp_path.iterdir())


def test_a_given_registry_is_left_as_it_was() -> None:
    """Registering scrapes nothing, its own target info stays the only one, and at the end ours are gone."""
    registry = CollectorRegistry(target_info={"mine": "1"})
    before = generate_latest(registry)
    with torchotel.instrument(prometheus_registry=registry, traces_exporter="none") as handle:
        train()
        handle.flush()
        text = generate_latest(registry).decode()
        assert "torch_steps_total 1.0" in text
        assert text.count("target_info{") == 1
    assert generate_latest(registry) == before


def test_a_given_registry_knows_our_names(caplog: pytest.LogCaptureFixture) -> None:
    """A part of it can be scraped, a name is taken once, and one that is taken costs a warning."""
    registry = CollectorRegistry()
    with torchotel.instrument(prometheus_registry=registry, traces_exporter="none") as handle:
        train()
        handle.flush()
        parts = {
            name: generate_latest(registry.restricted_registry([name])).decode()
            for name in ("mine", "torch_steps_total", "torch_step_duration_seconds_bucket")
        }
        assert [text.count("\ntorch_") for text in parts.values()] == [0, 1, 18]
        with pytest.raises(ValueError, match="torch_steps"):
            Counter("torch_steps", "of the program", registry=registry)
    Counter("torch_steps", "of the program", registry=registry)
    with torchotel.instrument(prometheus_registry=registry, traces_exporter="none"):
        assert "torch_evaluations" not in generate_latest(registry).decode()
    assert "torch_steps_total 0.0" in generate_latest(registry).decode()
    assert "Give another registry" in caplog.text


def test_companions_of_a_process_may_write_their_target_at_once(tmp_path: Path) -> None:
    """A process may end a session while it starts the next; each has a companion, which writes the same file."""
    files = [DiscoveryFile(tmp_path, "digits", 1) for _ in range(4)]

    def write_often(file: DiscoveryFile) -> None:
        for _ in range(200):
            file.write("127.0.0.1", 9464)

    with ThreadPoolExecutor() as pool:
        list(pool.map(write_often, files))
    (left,) = tmp_path.iterdir()
    assert json.loads(left.read_text())[0]["targets"] == ["127.0.0.1:9464"]


@pytest.mark.parametrize(("setting", "bad"), [("discovery_dir", "file/below"), ("prometheus_host", "203.0.113.7")])
def test_what_cannot_be_used_is_told(setting: str, bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was installed then, and no run file is left."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        torchotel.instrument(traces_exporter="none", record=tmp_path / "run", **{setting: bad})  # type: ignore[arg-type]  # one setting each
    assert caught.value.field == setting
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_host_that_another_program_means_is_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Metrics are served on the default host, and one warning names the variable."""
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_HOST", "203.0.113.7")
    for _ in range(2):
        with torchotel.instrument(traces_exporter="none") as handle:
            assert handle.prometheus_port is not None
            train()
            handle.flush()
            assert value(scrape(handle.prometheus_port).series, "torch_steps_total") == 1
    (warning,) = [record.getMessage() for record in caplog.records if "HOST" in record.getMessage()]
    assert warning.startswith("OTEL_EXPORTER_PROMETHEUS_HOST is ignored: got '203.0.113.7', takes an address")


def test_warns_where_others_can_read(caplog: pytest.LogCaptureFixture) -> None:
    """An address that is not loopback shows names and values to whoever reaches it."""
    with caplog.at_level(logging.WARNING, "torchotel"):
        torchotel.instrument(traces_exporter="none", prometheus_host="0.0.0.0").shutdown()  # noqa: S104  # the claim
        torchotel.instrument(traces_exporter="none", prometheus_host="localhost").shutdown()
    assert ["0.0.0.0" in record.getMessage() for record in caplog.records] == [True]  # noqa: S104  # a text in a message


def test_scrapes_while_training() -> None:
    """Every answer is whole, and no counter goes back."""
    ended = threading.Event()
    seen: list[float] = []
    with torchotel.instrument(detail="all", traces_exporter="none") as handle:

        def keep_scraping() -> None:
            while not ended.is_set():
                series = scrape(handle.prometheus_port, OPENMETRICS).series
                assert (
                    series["torch_steps_total", frozenset()] == series["torch_step_duration_seconds_count", frozenset()]
                )
                seen.append(series["torch_steps_total", frozenset()])

        scraper = threading.Thread(target=keep_scraping)
        scraper.start()
        train(steps=200)
        handle.flush()
        while not seen or seen[-1] < 200:
            assert scraper.is_alive()
        ended.set()
        scraper.join()
    assert seen == sorted(seen)


def test_dropped_traces_are_no_exemplars() -> None:
    """Spans that were refused are counted, and no exemplar leads to them."""
    with receiver() as server:
        server.answers.extend([Answer(400)] * 100)
        with torchotel.instrument(endpoint=server.url.removesuffix("/v1/traces"), detail="all") as handle:
            train(3)
            assert not handle.flush()
            answer = scrape(handle.prometheus_port, OPENMETRICS)
    assert value(answer.series, "torch_step_duration_seconds_count") == 3
    assert not answer.exemplars
    recorded = handle.stats()["spans_recorded"]
    assert value(answer.series, "torchotel_spans_total", torchotel_outcome="dropped_export") == recorded > 0
    assert value(answer.series, "torchotel_export_errors_total", error_type="400") == 1


def test_a_forked_child_lets_go_of_the_port(tmp_path: Path) -> None:
    """Its copy is closed, the target stays the parent's, and it collects and pushes nothing."""
    registry = CollectorRegistry()
    with receiver() as server:
        handle = torchotel.instrument(
            endpoint=server.url.removesuffix("/v1/traces"), metrics_exporter="prometheus,otlp", discovery_dir=tmp_path
        )
        port = handle.prometheus_port
        handle.flush()
        go, told = os.pipe(), os.pipe()
        child = os.fork()
        if not child:
            os.write(told[1], b"x" if handle.prometheus_port is None else b"-")
            os.read(go[0], 1)
            handle.shutdown()
            os._exit(len(generate_latest(registry)))
        assert os.read(told[0], 1) == b"x"
        assert len(list(tmp_path.iterdir())) == 1
        assert value(scrape(port).series, "torch_steps_total") == 0
        handle.shutdown()
        pushed = len(server.pushed)
        assert not is_listening(port)  # with the child alive
        os.write(go[1], b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(server.pushed) == pushed
        for end in (*go, *told):
            os.close(end)


@pytest.mark.program
def test_a_spawned_loader_worker_opens_no_port(tmp_path: Path) -> None:
    """The user's script runs again in it, which must take no port away and leave no target."""
    script = tmp_path / "script.py"
    script.write_text(SPAWNING)
    env = environment(OTEL_TRACES_EXPORTER="none", TORCHOTEL_DISCOVERY_DIR=str(tmp_path / "targets"))
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.splitlines() == ["no port", "1 port"]
    assert not list((tmp_path / "targets").iterdir())


SPAWNING = """
import multiprocessing
import torch
import torchotel
handle = torchotel.instrument()

def look(trains):
    if trains:
        model = torch.nn.Linear(1, 1)
        model(torch.ones(1, 1)).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        handle.flush()
    print("1 port" if handle.prometheus_port else "no port", flush=True)

if __name__ == "__main__":
    for trains in (False, True):
        child = multiprocessing.get_context("spawn").Process(target=look, args=(trains,))
        child.start()
        child.join()
"""


def test_labels_that_fall_together_are_joined() -> None:
    """Names are made valid, values are text, and no value gets lost."""
    assert target_labels({"a.b": 1, "a_b": "two", "1st": True, "__x": ("p", "q"), "ü": 1.5}) == {
        "a_b": "1;two",
        "key_1st": "true",
        "_x": '["p", "q"]',
        "_": "1.5",
    }


def test_the_end_is_quick() -> None:
    """Closing waits for no poll that lasts."""
    handle = torchotel.instrument(traces_exporter="none")
    began_s = time.monotonic()
    handle.shutdown()
    assert time.monotonic() - began_s < 5


@pytest.mark.parametrize(("chosen", "shown"), [("always_off", 0), ("trace_based", 1), ("always_on", 1)])
def test_exemplars_can_be_switched_off(chosen: str, shown: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By OpenTelemetry's variable, as for metrics that are pushed."""
    monkeypatch.setenv("OTEL_METRICS_EXEMPLAR_FILTER", chosen)
    with (
        receiver() as server,
        torchotel.instrument(endpoint=server.url.removesuffix("/v1/traces"), prometheus_port=0) as handle,
    ):
        train()
        handle.flush()
        assert len(scrape(handle.prometheus_port, OPENMETRICS).exemplars) == shown
