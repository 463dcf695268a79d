"""The leak check around every test, nothing of ours is left behind, and the fixtures of many of them."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.utils.data.dataloader as data_loader
from support import server_binaries
from support.otlp_http_receiver import Receiver, receiver
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as torch_optimizer

import torchotel
from torchotel._utils.faults import process_warnings

if "PYTEST_XDIST_WORKER" in os.environ:  # as many of them as there are cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the programs that tests start
    torch.set_num_threads(1)

# A job in a shell's background has it ignored, and so would the programs have that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _global_state() -> dict[str, object]:
    """Give every dictionary of global hooks and every attribute that torchotel replaces."""
    hooks = {
        f"{owner.__name__}.{name}": dict(value)
        for owner in (nn_module, torch_optimizer)
        for name, value in vars(owner).items()
        if name.startswith("_global") and isinstance(value, dict)
    }
    replaced: dict[str, object] = {
        "backward": vars(torch.autograd)["_engine_run_backward"],
        "next": data_loader._BaseDataLoaderIter.__next__,
        "iter": data_loader.DataLoader.__iter__,
        "scaler": [vars(torch.amp.GradScaler)[name] for name in ("scale", "step", "update")],
        "compile": torch.nn.Module.compile,
    }
    return {**hooks, **replaced}


def _our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("torchotel")]


def _companions() -> list[str]:
    """Give the companion processes of this process."""
    children: list[str] = []
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # the thread has ended
            children += (thread / "children").read_text().split()
    return [child for child in children if "torchotel.worker.companion" in _command(child)]


def _command(pid: str) -> str:
    with suppress(OSError):  # the process has ended
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def _listening() -> set[str]:
    """Give the sockets of this process that take connections."""
    found: set[str] = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the folder's own is closed by now
            name = str(entry.readlink())
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as one:
                    if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.add(name)
    return found


@pytest.fixture(autouse=True, scope="session")
def _own_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Take the tests' own variables out, since torchotel warns of what it does not know; a stack is left alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        for name in server_binaries.VARIABLES:
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(autouse=True)
def _nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compare hooks, patches, threads and listening ports with what was there before."""
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", "0")  # whoever else runs on this machine
    monkeypatch.setenv("TORCHOTEL_WORKER", "thread")  # a companion for each test would take minutes; programs have one
    torch.manual_seed(0)
    process_warnings.forget()
    before, ports = _global_state(), _listening()
    yield
    torchotel.uninstrument()
    assert _global_state() == before
    for thread in threading.enumerate():
        if thread.name.startswith("torchotel"):
            thread.join(5)
    assert _our_threads() == []
    assert _listening() == ports
    assert _companions() == []


@pytest.fixture
def server() -> Iterator[Receiver]:
    """Run a receiver."""
    with receiver() as running:
        yield running


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Let threads take turns as often as Python can."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before_s)
