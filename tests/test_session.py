"""From `instrument()` to `shutdown()`: what is counted, what happens without an endpoint, what a second call does."""

import gc
import json
import logging
import random
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from misbehaving import closed_port
from receiver import receiver
from support import recorded, roots, train
from torch import nn
from torch.nn.modules import module as nn_module

import torchotel
from torchotel import ConfigError
from torchotel._handle import start
from torchotel.capture.detail import WHILE_MEASURING, is_chosen
from torchotel.telemetry.budget import LEAST_OFTEN

STEPS = 5


@contextmanager
def _audited() -> Iterator[list[str]]:
    """Keep the network and file events that Python's audit hook sees on this thread."""
    events: list[str] = []
    state = {"on": True}
    thread = threading.get_ident()

    def hook(event: str, args: tuple[object, ...]) -> None:
        if state["on"] and threading.get_ident() == thread and event.startswith(("socket.", "open", "os.")):
            events.append(f"{event} {args}")

    sys.addaudithook(hook)
    try:
        yield events
    finally:
        state["on"] = False  # an audit hook can't be removed


def test_no_endpoint_listening(caplog: pytest.LogCaptureFixture) -> None:
    """Training makes no network or file call, one warning is logged, and every span is counted as dropped."""
    train(1)  # torch itself opens files at its first step
    handle = torchotel.instrument(endpoint=f"http://127.0.0.1:{closed_port()}", detail="all")
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


def test_spans_as_a_receiver_sees_them() -> None:
    """Ids are unique, parents right, children inside, nothing lost; steps link to the one `torch.run`."""
    with recorded() as run:
        train(20)
    (first,) = [root for root in run.roots if root.name == "torch.run"]
    assert len(run.steps) == 20
    assert len({step.span.trace_id for step in run.steps}) == 20
    for step in run.steps:
        assert step.span.links == []  # a root with links has no critical path in Jaeger's page
        assert [link.span_id for link in step.children[0].span.links] == [first.span.span_id]
        assert {span.attributes["torch.step.number"] for span in step.walk()} == {step.attributes["torch.step.number"]}
    assert first.attributes["torch.model"] == "Sequential"
    assert first.attributes["torchotel.config.detail"] == "all"
    assert not any("header" in name for name in first.attributes)


def test_siblings_stand_a_microsecond_apart() -> None:
    """Jaeger counts in microseconds, and touching siblings vanish from its critical path."""
    with recorded() as run:
        train(STEPS)
    for step in run.steps:
        for span in step.walk():
            for one, following in pairwise(span.children):
                assert one.end_ns // 1000 < following.start_ns // 1000


def test_folding_at_max_spans() -> None:
    """Above `max_spans` the deepest modules fold into their parents, which say how many and how long."""
    blocks = nn.Sequential(*[nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)]) for _ in range(4)])
    with recorded(max_spans=15) as run:
        blocks(torch.randn(2, 4)).sum().backward()
    (step,) = run.steps
    assert len(list(step.walk())) == 13  # step, 2 phases, 2 roots, 8 blocks
    block = step.find("forward 2")
    assert block.children == []
    assert block.attributes["torch.folded.calls"] == 5
    assert 0 < block.attributes["torch.folded.time"] <= (block.end_ns - block.start_ns) / 1e9
    assert step.find("backward 2").attributes["torch.folded.calls"] == 5


def test_a_thousand_forwards_stay_within_max_spans() -> None:
    """Even outermost calls and phases fold where there are too many."""
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with recorded(max_spans=50) as run:
        for _ in range(60):
            net(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    (step,) = run.steps
    assert len(list(step.walk())) <= 50
    assert step.attributes["torch.folded.calls"] > 0


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"include": "0*"}, {"forward 0", "forward 0.0", "backward 0", "backward 0.0"}),
        ({"exclude": ["*.0", "1"]}, {"forward Sequential", "forward 0", "backward Sequential", "backward 0"}),
        ({"max_depth": 0}, {"forward Sequential", "backward Sequential"}),
    ],
)
def test_which_modules_get_spans(settings: dict[str, Any], names: set[str]) -> None:
    """Modules that are left out make no span; what they hold stands under the next one that is shown."""
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    with recorded(**settings) as run:
        net(torch.randn(2, 4)).sum().backward()
    (step,) = run.steps
    assert {span.name for span in step.walk() if span.name.startswith(("forward", "backward"))} == names


def test_without_shapes() -> None:
    """`shapes=False` leaves shapes and dtypes out, and nothing else."""
    with recorded(shapes=False) as run:
        train(1)
    attributes = run.steps[0].find("forward 0").attributes
    assert not any("shapes" in name or "dtypes" in name for name in attributes)
    assert attributes["torch.device"] == "cpu"


def test_auto_stays_within_its_budget() -> None:
    """ "auto" is the first ten steps, one in eight until it is known what that costs, then no more than is allowed."""
    # Of steps as short as these, detail takes far more than this.
    with recorded("auto", overhead_budget=1e-6) as run:
        for _ in range(200):
            train(1)
            run.handle.flush()  # the worker has measured the step before the next begins
    detailed = [int(str(step.attributes["torch.step.number"])) for step in run.steps if step.find_all("forward 0")]
    assert detailed[:10] == list(range(10))
    measured = [number for number in detailed[10:] if not is_chosen(number, LEAST_OFTEN)]
    assert [number // WHILE_MEASURING for number in measured] == list(range(measured[0] // 8, measured[0] // 8 + 5))
    reasons = [step.attributes.get("torch.kept.reason") for step in run.steps]
    assert reasons[:10] == ["first"] * 10
    assert {reasons[number] for number in detailed[10:]} <= {"sampled", "slow"}
    assert {reasons[number] for number in range(10, 200) if number not in detailed} <= {None, "slow"}
    stats = run.handle.stats()
    assert (stats["steps"], stats["steps_detailed"]) == (200, len(detailed))
    assert stats["overhead_ratio"] is not None


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
    cases: list[dict[str, Any]] = [{"detail": 0}, {"record": tmp_path}, {"model": 3}]
    for settings in cases:
        with pytest.raises(ConfigError) as caught:
            torchotel.instrument(**settings)
        assert caught.value.field in settings
    assert vars(torch.autograd)["_engine_run_backward"] is engine
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("torchotel")]


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


def test_instrumenting_loads_what_is_used() -> None:
    """`instrument()` loads neither Dynamo, nor ways out that are not used, nor a framework."""
    script = (
        "import sys, torch, torchotel\n"
        "handle = torchotel.instrument(prometheus_port=0)\n"
        "unused = {'torch._dynamo', 'prometheus_client', 'grpc', 'torchotel.exporters.sdk.engine'}\n"
        "unused |= {'transformers', 'accelerate', 'lightning', 'pytorch_lightning'}\n"
        "print((unused | {'opentelemetry.sdk.trace'}) & set(sys.modules))\n"
        "handle.shutdown()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout == "set()\n"


def test_importing_brings_in_nothing() -> None:
    """`import torchotel` loads neither torch nor OpenTelemetry."""
    program = "import sys, torchotel; print([name for name in ('torch', 'opentelemetry') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_public_names() -> None:
    """`__all__` is what is there."""
    public = {name for name in vars(torchotel) if not name.startswith("_")}
    assert set(torchotel.__all__) <= public
    assert roots([]) == []


def test_ids_and_the_programs_random_numbers() -> None:
    """Ids are unique where the program seeds again at each step, and its random numbers are what they were."""
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    drawn = []
    with recorded("off") as run:
        for _ in range(3):
            random.seed(1)
            net(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            assert run.handle.flush()
            drawn.append(random.random())
    random.seed(1)
    assert drawn == [random.random()] * 3
    assert len({step.span.trace_id for step in run.steps}) == 3


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


def test_ctrl_c_still_ends_the_program_as_one() -> None:
    """A program that Ctrl-C ends has the exit status of one, though spans are sent after it."""
    program = (
        "import sys, torch, torchotel\n"
        f"torchotel.instrument(endpoint='http://127.0.0.1:{closed_port()}', detail='all')\n"
        "net = torch.nn.Linear(2, 2)\n"
        "while not hasattr(sys.modules.get('requests'), 'ConnectionError'):\n"
        "    net(torch.randn(1, 2)).sum().backward()\n"
        "raise KeyboardInterrupt\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=60, capture_output=True)
    assert done.returncode == -signal.SIGINT


def test_only_the_first_rank_sends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`torch.run` has the same ids on all ranks, so one of them sends it; each rank has a run file of its own."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with recorded(record=tmp_path / "run") as run:
        train(2)
    assert {root.name for root in run.roots} == {"torch.step"}
    assert (tmp_path / "run-rank1" / "run.json").exists()


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
