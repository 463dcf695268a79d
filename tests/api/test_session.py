"""From `instrument()` to `shutdown()`: what is counted, what happens without an endpoint, what a second call does."""

import gc
import json
import logging
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from support.misbehaving_servers import closed_port
from support.otlp_http_receiver import receiver
from support.recorded_training import recorded, roots, train
from torch.nn.modules import module as nn_module

import torchotel
from torchotel import ConfigError
from torchotel._handle import start

STEPS = 5


@contextmanager
def _audited() -> Iterator[list[str]]:
    """Keep the network and file events that Python's audit hook sees on this thread."""
    events: list[str] = []
    state = {"on": True}
    thread = threading.get_ident()

    def hook(event: str, args: tuple[object, ...]) -> None:
        if not state["on"] or threading.get_ident() != thread or not event.startswith(("socket.", "open", "os.")):
            return
        if args[:1] != ("/proc/self/status",):  # with a companion, read once a second for the signal of stalls
            events.append(f"{event} {args}")

    sys.addaudithook(hook)
    try:
        yield events
    finally:
        state["on"] = False  # an audit hook can't be removed


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_no_endpoint_listening(worker: Literal["thread", "process"], caplog: pytest.LogCaptureFixture) -> None:
    """Training makes no network or file call, one warning is logged, and every span is counted as dropped."""
    train(1)  # torch itself opens files at its first step
    endpoint = f"http://127.0.0.1:{closed_port()}"
    handle = torchotel.instrument(endpoint=endpoint, detail="all", worker=worker)
    with caplog.at_level(logging.WARNING, "torchotel"):
        with _audited() as events:
            train(STEPS)
        assert handle.flush(timeout_s=1) is False
        handle.shutdown(timeout_s=1)
    assert events == []
    assert len(caplog.records) == 1
    stats = handle.stats()
    assert stats["steps"] == STEPS
    assert stats["spans_exported"] == 0
    assert stats["spans_recorded"] == stats["spans_dropped"] != 0
    assert stats["export_errors"] != 0


def test_the_run_file_is_whole_without_an_endpoint(tmp_path: Path) -> None:
    """A dead endpoint costs the run file nothing."""
    folder = tmp_path / "run"
    handle = torchotel.instrument(endpoint=f"http://127.0.0.1:{closed_port()}", detail="all", record=folder)
    train(STEPS)
    handle.shutdown(timeout_s=1)
    lines = (folder / "trace-00001.jsonl").read_text().splitlines()
    assert len(lines) == STEPS + 1  # torch.run, then a line a step
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["number"] for step in steps] == list(range(STEPS))
    assert all(abs(sum(step["phases"].values()) - step["duration_s"]) < 1e-9 for step in steps)
    run = json.loads((folder / "run.json").read_text())
    assert run["finished"] is True
    assert run["model"] == {"name": "Sequential", "modules": 3, "parameters": 20}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_folders_stay_where_they_were_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may change its working directory while it runs."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    with torchotel.instrument(record="run", discovery_dir="targets", traces_exporter="none"):
        monkeypatch.chdir(elsewhere)
        train(STEPS)
    assert list(elsewhere.iterdir()) == list((tmp_path / "targets").iterdir()) == []
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == STEPS
    assert json.loads((tmp_path / "run" / "run.json").read_text())["finished"] is True


def test_a_second_call_returns_the_same_handle(caplog: pytest.LogCaptureFixture) -> None:
    """`instrument()` is idempotent; other settings are warned of and not taken."""
    handle = torchotel.instrument(traces_exporter="none", detail="off")
    assert torchotel.instrument(traces_exporter="none", detail="off") is handle
    assert caplog.records == []
    assert torchotel.instrument(traces_exporter="none", detail="all") is handle
    assert len(caplog.records) == 1
    torchotel.uninstrument()
    with torchotel.instrument(traces_exporter="none", detail="off") as another:
        assert another is not handle


def test_zero_code_settings_give_way(tmp_path: Path) -> None:
    """Before the first step the program's own settings win over those of `torchotel run`; the rest stays."""
    folder = tmp_path / "run"
    handle = start({"record": folder, "traces_exporter": "none", "detail": "off"}, None, zero_code=True)
    assert torchotel.instrument(detail="all") is handle
    train(STEPS)
    handle.shutdown()
    assert handle.stats()["steps_detailed"] == STEPS
    assert json.loads((folder / "run.json").read_text())["config"]["detail"] == "all"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == STEPS


def test_zero_code_settings_stay_once_training_began(caplog: pytest.LogCaptureFixture) -> None:
    """After the first event nothing changes any more, and the log says what was not taken."""
    handle = start({"traces_exporter": "none", "detail": "off"}, None, zero_code=True)
    train(STEPS)
    assert torchotel.instrument(detail="all") is handle
    (record,) = caplog.records
    assert "another detail;" in record.getMessage()
    assert handle.config.detail == "off"


def test_disabled_installs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`OTEL_SDK_DISABLED=true` installs no hook, starts no thread, and the handle still answers."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    engine = vars(torch.autograd)["_engine_run_backward"]
    handle = torchotel.instrument()
    train(1)
    assert vars(torch.autograd)["_engine_run_backward"] is engine
    assert not nn_module._global_forward_pre_hooks
    assert handle.flush() is True
    assert set(handle.stats().values()) == {0, None}
    assert handle.prometheus_port is None
    handle.shutdown()


def test_a_bad_setting_installs_nothing(tmp_path: Path) -> None:
    """A bad value raises before anything is installed, also one that only shows when a folder is opened."""
    (tmp_path / "run.json").write_text("{}")
    engine = vars(torch.autograd)["_engine_run_backward"]
    cases: list[dict[str, Any]] = [{"detail": 0}, {"record": tmp_path / "run.json"}, {"model": 3}]
    for settings in cases:
        with pytest.raises(ConfigError) as caught:
            torchotel.instrument(**settings)
        assert caught.value.field in settings
    assert vars(torch.autograd)["_engine_run_backward"] is engine
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("torchotel")]


@pytest.mark.program
def test_a_program_that_ends_without_shutdown(tmp_path: Path) -> None:
    """What was recorded is brought out at the interpreter's end."""
    folder = tmp_path / "run"
    program = (
        "import torch, torchotel\n"
        f"torchotel.instrument(record={str(folder)!r}, traces_exporter='none', detail='all')\n"
        "net = torch.nn.Linear(2, 2)\n"
        "net(torch.randn(1, 2)).sum().backward()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert json.loads((folder / "run.json").read_text())["finished"] is True
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.program
@pytest.mark.parametrize(
    ("settings", "unused"),
    [
        ("prometheus_port=0", set()),
        ("prometheus_port=None, traces_exporter='none'", {"requests"}),
    ],
)
def test_instrumenting_loads_what_is_used(settings: str, unused: set[str]) -> None:
    """`instrument()` loads neither Dynamo nor a framework, and only the exporters that its settings name."""
    script = (
        "import sys, torch, torchotel\n"
        f"handle = torchotel.instrument({settings})\n"
        f"unused = {{'torch._dynamo', 'grpc', 'torchotel.exporters.sdk.tracer_provider', *{unused}}}\n"
        "unused |= {'transformers', 'accelerate', 'lightning', 'pytorch_lightning'}\n"
        "print((unused | {'opentelemetry.sdk.trace'}) & set(sys.modules))\n"
        "handle.shutdown()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout == "set()\n"


@pytest.mark.program
def test_importing_brings_in_nothing() -> None:
    """`import torchotel` loads neither torch nor OpenTelemetry, nor what of the standard library is slow to load."""
    large = ["torch", "opentelemetry", "dataclasses", "logging", "multiprocessing", "importlib.resources"]
    program = f"import sys, torchotel; print([name for name in {large} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_public_names() -> None:
    """`__all__` is what is there."""
    public = {name for name in vars(torchotel) if not name.startswith("_")}
    assert set(torchotel.__all__) <= public
    assert roots([]) == []


def test_the_last_step_of_a_thread_that_has_ended() -> None:
    """What a thread leaves behind is handed over at the next flush, whatever the garbage collector did meanwhile."""
    with recorded("all") as run:
        for _ in range(3):
            thread = threading.Thread(target=train, args=(2,))
            thread.start()
            thread.join()
        gc.collect()
        assert run.handle.flush()
        assert run.handle.stats()["steps"] == 6
    assert len(run.steps) == 6


@pytest.mark.program
@pytest.mark.parametrize("worker", ["thread", "process"])
def test_ctrl_c_still_ends_the_program_as_one(worker: str) -> None:
    """A program that Ctrl-C ends has the exit status of one, though spans are sent after it."""
    program = (
        "import torch, torchotel\n"
        f"torchotel.instrument(endpoint='http://127.0.0.1:{closed_port()}', detail='all', worker='{worker}')\n"
        "torch.nn.Linear(2, 2)(torch.randn(1, 2)).sum().backward()\n"
        "raise KeyboardInterrupt\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=120, capture_output=True)
    assert done.returncode == -signal.SIGINT


def test_only_the_first_rank_sends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`torch.run` has the same ids on all ranks, so one of them sends it; each rank has a run file of its own."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with recorded(record=tmp_path / "run") as run:
        train(2)
    assert {root.name for root in run.roots} == {"torch.step"}
    (link,) = run.steps[0].children[0].span.links
    assert link.flags & 0x200, "the span is another process's"
    assert (tmp_path / "run" / "rank1" / "run.json").exists()


def test_a_shutdown_that_has_no_time() -> None:
    """What the worker can't build in time is dropped and counted."""
    with receiver() as server:
        handle = torchotel.instrument(endpoint=server.url.removesuffix("/v1/traces"), detail="all")
        train(300)
        handle.shutdown(timeout_s=0.01)
    stats = handle.stats()
    assert stats["steps"] == 300
    assert stats["spans_recorded"] == stats["spans_exported"] + stats["spans_dropped"]
    assert stats["spans_dropped"] > 0
