"""A training with a companion process: `companion_program.py FOLDER ENDPOINT WHAT`.

It prints the id of the companion, WHAT happens after twenty steps, and it trains twenty more.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import urllib.request
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import torchotel
from torchotel.worker.channel import _DROPPED

STEPS = 20
CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children")


def say(*words: object) -> None:
    """Print a line at once."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def companion() -> int:
    """Return the id of the only child of this process."""
    (child,) = CHILDREN.read_text().split()
    return int(child)


def claimed(fd: Path) -> str:
    """Return what a descriptor is, if it belongs to torchotel."""
    try:
        target = str(fd.readlink())
    except FileNotFoundError:  # of the listing itself
        return ""
    own = (
        "memfd:torchotel" in target
        or target.endswith(("metrics.jsonl", "unsent.jsonl"))
        or target.startswith("socket:")
    )
    return target if own else ""


def open_here() -> set[str]:
    """Return the descriptors of this process that belong to torchotel, or may do so."""
    return set(filter(None, map(claimed, Path("/proc/self/fd").iterdir())))


def kill_companion(pid: int) -> None:
    """Kill the companion, and wait until another one has taken its place."""
    os.kill(pid, signal.SIGKILL)
    wait_for_restart(pid)


def wait_for_restart(pid: int) -> None:
    """Wait until another companion has taken the place of one that ends."""
    while CHILDREN.read_text().split() in ([], [str(pid)]):
        pass


def is_open(port: int) -> bool:
    """Return whether something listens on a port of this machine."""
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    except ConnectionResetError:  # it closes now
        return True
    return True


class Program:
    """The training, and what can happen in it.

    Args:
        folder: The folder of the run file.
        endpoint: The OTLP endpoint.
    """

    def __init__(self, folder: str, endpoint: str) -> None:
        torch.ones(1, requires_grad=True).sum().backward()  # the first backward asks CUDA, which opens a socket
        self._others = open_here()
        self.handle = torchotel.instrument(worker="process", record=folder, endpoint=endpoint, detail="all")
        self._net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self._optimizer = torch.optim.SGD(self._net.parameters(), 0.1)
        self.happenings = {
            "nothing": lambda: None,
            "kill me": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "exec": self._become_another_program,
            "kill the companion": self._kill_the_companion,
            "kill a companion that has reported": self._kill_a_companion_that_has_reported,
            "kill a companion that is behind": self._kill_a_companion_that_is_behind,
            "kill both companions": self._kill_both_companions,
            "shut down with a stopped companion": self._shut_down_with_a_stopped_companion,
            "stop the companion": self._stop_the_companion,
            "shut down amid a restart": self._shut_down_amid_a_restart,
            "fill the channel": self._fill_the_channel,
            "train a large model": self._train_a_large_model,
            "garble the channel": self._garble_the_channel,
            "end a step amid a record": self._end_a_step_amid_a_record,
            "fork": self._fork,
            "break the log": self._break_the_log,
            "die with an open port": self._die_with_an_open_port,
            "look": self._look,
        }

    def train(self) -> None:
        """Train some steps."""
        for _ in range(STEPS):
            self._net(torch.ones(2, 4)).square().mean().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()

    def _backend(self) -> Any:
        assert self.handle.session is not None
        return self.handle.session._backend

    def _become_another_program(self) -> None:
        words = [sys.executable, "-c", "print('another program')"]
        os.execv(sys.executable, words)  # noqa: S606  # no shell is wanted: this interpreter replaces the training

    def _kill_a_companion_that_is_behind(self) -> None:
        """Print the spans of twenty steps, and the spans that are dropped with twenty steps after many others."""
        self.handle.flush()
        before = self.handle.stats()["spans_recorded"]
        self.train()
        self.handle.flush()
        spans = self.handle.stats()["spans_recorded"] - before
        for _ in range(20):  # an error of a span a step would be four hundred
            self.train()
        self.handle.flush()
        os.kill(companion(), signal.SIGSTOP)
        self.train()
        kill_companion(companion())
        self.handle.flush()
        say(spans, self.handle.stats()["spans_dropped"])

    def _shut_down_with_a_stopped_companion(self) -> None:
        self.handle.flush()
        os.kill(companion(), signal.SIGSTOP)
        self.train()
        self.handle.shutdown(0.5)
        say(self.handle.stats()["spans_dropped"])

    def _kill_the_companion(self) -> None:
        self.handle.flush()
        kill_companion(companion())
        self.train()
        self.handle.flush()

    def _kill_a_companion_that_has_reported(self) -> None:
        """Print the steps that are known, without any request to the companion."""
        reporting = self._backend()._companion
        while reporting.counts["steps"] < STEPS - 1:
            pass
        kill_companion(companion())
        self.handle.stats()
        say(self.handle.stats()["steps"])

    def _kill_both_companions(self) -> None:
        self.handle.flush()
        kill_companion(companion())
        os.kill(companion(), signal.SIGKILL)
        while self.handle.flush(1):
            pass
        while is_open(self.handle.prometheus_port or 0):
            pass

    def _shut_down_amid_a_restart(self) -> None:
        """Print the children that `shutdown()` leaves, if another companion has just been started."""
        started, shut_down = threading.Event(), threading.Event()

        def start_late(thread: threading.Thread) -> None:
            if threading.current_thread().name == "torchotel-control":
                started.set()
                shut_down.wait(1)  # in vain, if `shutdown()` waits for the restart
            start(thread)

        start = threading.Thread.start
        with patch.object(threading.Thread, "start", start_late):
            self.handle.flush()
            os.kill(companion(), signal.SIGKILL)
            started.wait(60)
            self.handle.shutdown()
        shut_down.set()
        say(CHILDREN.read_text().split())

    def _stop_the_companion(self) -> None:
        pid = companion()
        os.kill(pid, signal.SIGSTOP)
        self.train()
        complete = self.handle.flush(0.2)
        os.kill(pid, signal.SIGCONT)
        say(complete, self.handle.flush())

    def _fill_the_channel(self) -> None:
        """Print whether spans were dropped, and are so in the metric."""
        pid = companion()
        self.handle.flush()
        os.kill(pid, signal.SIGSTOP)
        while self._backend()._channel._positions[_DROPPED] == 0:
            self.train()
        os.kill(pid, signal.SIGCONT)
        complete = self.handle.flush()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.handle.prometheus_port}/metrics") as scrape:
            (line,) = [line for line in scrape.read().decode().splitlines() if 'outcome="dropped_queue"' in line]
        say(complete, self.handle.flush(), float(line.split()[-1]) == self.handle.stats()["spans_dropped"] > 0)

    def _train_a_large_model(self) -> None:
        """Print whether a step of a model that is too large for the channel was dropped."""
        self.handle.flush()
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(800)])
        model(torch.ones(2, 4)).sum().backward()
        self._optimizer.step()
        self.train()
        say(self.handle.flush(), self.handle.stats()["spans_dropped"] > 0)

    def _garble_the_channel(self) -> None:
        self.handle.flush()
        pid = companion()
        self._backend()._channel.send(b"garbled")
        wait_for_restart(pid)
        self.train()
        self.handle.flush()

    def _end_a_step_amid_a_record(self) -> None:
        """Interrupt the encoding of a step by a signal, whose handler ends a step of its own."""

        def interrupt(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_name == "_encode_step":
                sys.setprofile(None)
                signal.raise_signal(signal.SIGUSR1)

        def handle(*_: object) -> None:
            with torchotel.step():
                pass
            torchotel.log(inside=1)

        signal.signal(signal.SIGUSR1, handle)
        sys.setprofile(interrupt)
        self.train()
        say(sys.getprofile(), self.handle.flush())

    def _fork(self) -> None:
        """Print what a forked child has of torchotel."""
        if os.fork() == 0:
            say(sorted(open_here() - self._others))
            os._exit(0)
        os.wait()

    def _break_the_log(self) -> None:
        """Print whether the companion responds after a log filter has raised at a message of the companion."""
        met = threading.Event()

        def refuse(record: logging.LogRecord) -> bool:
            met.set()
            raise RuntimeError(record.getMessage())

        logging.getLogger("torchotel").addFilter(refuse)
        self._backend()._companion._connection.send(ask="nothing that a companion knows")
        self.train()
        self.handle.flush()
        met.wait(60)
        say(met.is_set(), self.handle.stats()["steps"] > STEPS)

    def _die_with_an_open_port(self) -> None:
        say(self.handle.prometheus_port)
        os.kill(os.getpid(), signal.SIGKILL)

    def _look(self) -> None:
        """Print what the system shows of the companion."""
        self.handle.flush()
        pid = companion()
        process = Path(f"/proc/{pid}")
        say((process / "cmdline").read_text().replace("\0", " "))
        say([name in (process / "maps").read_text() for name in ("libtorch", "_multiarray_umath")])
        say(os.getsid(pid) == pid, os.getpriority(os.PRIO_PROCESS, pid))


def main() -> None:
    """Train, let it happen, and train on."""
    folder, endpoint, what = sys.argv[1:]
    program = Program(folder, endpoint)
    program.train()
    say(companion())
    sys.stdin.readline()
    program.happenings[what]()
    program.train()
    program.handle.shutdown()
    stats = program.handle.stats()
    say(stats["steps"], stats["spans_recorded"] - stats["spans_exported"] - stats["spans_dropped"])


if __name__ == "__main__":
    main()
