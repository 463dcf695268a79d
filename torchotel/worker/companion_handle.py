"""The companion process as the training process sees it: start it, ask it, and end it."""

from __future__ import annotations

import itertools
import logging
import marshal
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from torchotel._collectives import CollectiveReading, encode_reading
from torchotel._records import plain
from torchotel._utils.faults import Guard
from torchotel.worker.channel import Connection, socket_pair
from torchotel.worker.record_codec import CompanionSettings
from torchotel.worker.stats import no_stats
from torchotel.worker.thread import LAST_RECORD_S

ANSWER_LATE_S = 1.0
"""Further time for an answer that takes all of its own time."""
EXIT_S = LAST_RECORD_S + 1.0
"""Further time for the companion to end: the worker's, and 0.1 s for each exporter."""

PROGRAM = (
    "import marshal, sys; sys.path[:], settings = marshal.load(sys.stdin.buffer); "
    "from torchotel.worker.companion import main; main(settings)"
)
"""What the companion runs: it finds modules wherever this process finds them."""

_logger = logging.getLogger("torchotel")


class Companion:
    """The companion process, and the thread that reads what it says.

    Args:
        channel_fd: The descriptor of the ring.
        settings: What the companion needs to start.
        read_collectives: Reads the flight recorder, on a thread of its own, when the companion asks for it.
        on_end: Called with the exit code and the last line of its errors if the process ends by itself, on the control
            thread.
        guard: Counts messages that cannot be read, and log messages that the program's logging fails on.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(
        self,
        channel_fd: int,
        settings: CompanionSettings,
        read_collectives: Callable[[], CollectiveReading | None],
        on_end: Callable[[str], None],
        guard: Guard,
    ) -> None:
        self._on_end = on_end
        self._read = guard.guarded(self._on_message)
        self._read_collectives, self._send_reading = read_collectives, guard.guarded(self._send_collectives)
        ours, theirs = socket_pair()
        self._connection = Connection(ours)
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any] | None]] = {}
        self._numbers = itertools.count()
        self._killed = False
        self.alive = True
        self.ended_early = False
        """Whether the process has ended without an answer to the request "stop", the last of its counts."""
        self._has_stopped = False
        self.counts = no_stats()
        """The last counts that the process sent."""
        self.spans_estimated = 0
        """The sum of the estimates of the records in these counts."""
        flags = "-PSE" if sys.flags.ignore_environment else "-PS"  # without `site`: its work is in `sys.path`
        command = [sys.executable, flags, "-c", PROGRAM, str(channel_fd), str(theirs.fileno())]
        optional = (
            settings.metrics_fd,
            settings.unsent_fd,
            settings.listener_fd,
            settings.signals_fd,
            settings.stacks_fd,
        )
        self._errors = _memory_file()
        """The standard error of the process, until it has started."""
        with theirs, _memory_file(marshal.dumps(plain((sys.path, settings)))) as start:
            self._process = subprocess.Popen(  # noqa: S603  # this interpreter runs a module of this package
                command,
                stdin=start,
                stdout=subprocess.DEVNULL,  # not the program's: `python train.py | tee log` would wait for its end
                stderr=self._errors,
                pass_fds=[channel_fd, theirs.fileno(), *(fd for fd in optional if fd is not None)],
                start_new_session=True,  # Ctrl-C in the terminal does not reach it
            )
        self.pid = self._process.pid
        self._thread = threading.Thread(target=self._listen, name="torchotel-control", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._process.kill()
            self._process.wait()
            self._connection.close()
            self._errors.close()
            raise

    def ask(
        self, what: str, timeout_s: float, late_s: float = ANSWER_LATE_S, **details: object
    ) -> dict[str, Any] | None:
        """Send a request that may take `timeout_s`; return its answer, None if there is none `late_s` after it."""
        number, timeout_s = next(self._numbers), max(0.0, timeout_s)
        deadline_s = time.monotonic() + timeout_s + late_s
        answers = self._answers[number] = queue.SimpleQueue()
        try:
            request = {"ask": what, "number": number, "timeout_s": timeout_s, **details}
            if not self.alive or not self._connection.send(timeout_s, **request):
                return None
            return answers.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            return None
        finally:
            del self._answers[number]

    def wake(self) -> None:
        """Let the companion empty the ring now."""
        self._connection.wake()

    def end(self, deadline_s: float) -> bool:
        """Wait for the process until the deadline, then kill it; return whether it had to be killed."""
        try:
            self._process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            return True
        self._thread.join(EXIT_S)  # it reads the last messages, and logs if the process has ended by itself
        self.kill()
        return False

    def kill(self) -> None:
        """End the process at once, if it has not ended."""
        self._killed = True
        self._process.kill()
        self._process.wait()
        self._connection.shut_down()
        if self._thread is not threading.current_thread():
            self._thread.join(EXIT_S)  # a log handler of the program may block it
        self._connection.close()
        self._errors.close()

    def disable_after_fork(self) -> None:
        """Close the copies of the connection and the memory file in a forked child."""
        self._connection.close()
        self._errors.close()

    def _listen(self) -> None:
        while (message := self._connection.receive()) is not None:
            self._read(message)
        self.ended_early = not self._has_stopped
        self.alive = False
        if self.ended_early and not self._killed:
            self._on_end(self._exit_reason())
        for answers in list(self._answers.values()):
            answers.put(None)

    def _exit_reason(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next(filter(None, reversed(lines)), "")
        return f"{code} ({last})" if last else str(code)

    def _on_message(self, message: dict[str, Any]) -> None:
        if "log" in message:
            _logger.log(message["log"], "%s", message["text"])
            return
        if "read" in message:
            # On another thread: a reading takes up to seconds, and answers go on to arrive.
            threading.Thread(target=self._send_reading, name="torchotel-collectives", daemon=True).start()
            return
        self.counts, self.spans_estimated = message["counts"], message["spans_estimated"]
        self._has_stopped = self._has_stopped or message.get("ask") == "stop"
        if (answers := self._answers.get(message.get("number", -1))) is not None:
            answers.put(message)

    def _send_collectives(self) -> None:
        reading = None
        try:
            reading = self._read_collectives()
        finally:  # the companion waits for an answer before it asks again
            encoded = None if reading is None else encode_reading(reading)
            if not self._connection.send(ask="collectives", reading=encoded):  # larger than a packet of the system
                self._connection.send(ask="collectives", reading=None)


def _memory_file(content: bytes = b"") -> BinaryIO:
    file = os.fdopen(os.memfd_create("torchotel"), "w+b")
    file.write(content)
    file.seek(0)
    return file
