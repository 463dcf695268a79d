"""The companion process: receives records, and processes them as the thread of a `ThreadBackend` does.

The supervisor starts it with the descriptors of the ring and the socket as arguments. `sys.path` and the settings are a
memory file at its standard input, since other users can read a command line. No module that it imports loads torch.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchotel._collectives import decode_reading
from torchotel._records import STALLED, Error, ModelInfo, Record, StepRecord
from torchotel._utils.distributed import Identity
from torchotel._utils.faults import Guard, Warn
from torchotel.config.config import Config
from torchotel.exporters.prometheus.server import Listener
from torchotel.exporters.run_folder import METRICS_NAME, ClaimedFolder, LineFile
from torchotel.exporters.sdk.global_provider import load_no_provider
from torchotel.tracing.resource import ProcessResource
from torchotel.worker.backend import Claims, RunEnd, SessionLinks, ThreadBackend
from torchotel.worker.channel import ChannelError, Connection, Receiver
from torchotel.worker.collective_watch import ReadingSchedule
from torchotel.worker.end_cause import PROCESS_ENDED, EndCause
from torchotel.worker.record_codec import CompanionSettings, RecordDecoder, RunStart
from torchotel.worker.stall_watch import StackReader, Stall, StallWatch, describe_frames
from torchotel.worker.stats import Stats, no_stats
from torchotel.worker.status_page import PagePhase, PageReader
from torchotel.worker.unsent_file import UNSENT_NAME, UnsentFile
from torchotel.worker.unsent_steps import UnsentSteps

INTERVAL_S = 0.2
"""Longest time that a record waits in the channel."""
UNSENT_NS = 1_000_000_000
"""Age at which the file of open steps is written again if only time has passed."""
CHECK_S = 1.0
"""Time between two checks for stalls, and two reports of the counts, which remain if the companion dies."""
LAST_FLUSH_S = 10.0
"""Time for the last export after the training process has ended without a shutdown."""
NICENESS = 10

STALL = (
    "Nothing has happened in the %s for %.0f s. Metrics and traces show the stall. Look in the stack for what the "
    "training waits for, or set stall_timeout_s to a longer time:\n%s"
)
NO_STACK = '  left out by exception_text="type"'
STALL_ENDED = "The training goes on"
_logger = logging.getLogger("torchotel")


class CompanionProcess:
    """Pass the records of the channel to a backend, and answer the requests of the training process.

    Args:
        channel: The records.
        connection: The requests.
        settings: What the training process knows.
    """

    def __init__(self, channel: Receiver, connection: Connection, settings: CompanionSettings) -> None:
        self._channel, self._connection = channel, connection
        self._decoder, self._guard, self._warn = RecordDecoder(), Guard("the companion process", limit=1000), Warn()
        self._parent = settings.pid
        self._page = page = PageReader(channel.page)
        self._unsent_steps = UnsentSteps(page)
        self._with_place = settings.config["exception_text"] != "type"
        self._end_cause = EndCause(settings.signals_fd, with_place=self._with_place)
        stacks = StackReader(settings.pid, settings.stacks_fd, page)
        self._stall_watch = StallWatch(page, stacks, settings.pid, settings.config["stall_timeout_s"])
        self._schedule, self._is_reading = ReadingSchedule(), False
        self._identity = Identity(*settings.identity)
        self._resource = ProcessResource(settings.described, lambda: self._identity)
        self._model: ModelInfo | None = None
        self._stopped = False
        self._unsent_file = _unsent_file(settings)
        self._unsent: list[tuple[str, int, int]] = []
        """Kind, number and count of the phases of the steps in that file."""
        self._unsent_ns = 0
        """When that file was written."""
        self._capture_stats = page.counts
        self._dropped = 0
        """Spans dropped by the full channel that were passed to the backend."""
        self._reported, self._check_at_s = no_stats(), 0.0
        with ExitStack() as undo:
            self._backend = ThreadBackend(
                Config(**settings.config),
                self._resource,
                settings.versions,
                SessionLinks(
                    model=lambda: self._model,
                    capture_stats=lambda: self._capture_stats,
                    overhead_ratio=lambda: page.overhead_ratio,
                    on_step=lambda *_: None,
                    read_collectives=lambda: None,  # the training process reads them
                ),
                undo,
                claims=_claims(settings),
                started_unix_ns=settings.started_unix_ns,
            )
            self._backend.start(undo)
            self._backend.set_stalled(stalled=False)
            undo.pop_all()

    def run(self) -> None:
        """Process records and requests until the training process asks for the end, or has ended."""
        while not self._stopped:
            request = self._connection.receive(INTERVAL_S)
            self._empty_channel()
            if request is None or os.getppid() != self._parent:  # a forked child may keep the connection open
                self._end_without_stop()
                return
            self._guard.guarded(self._write_unsent)()
            self._guard.guarded(self._check_each_second)()
            if request:
                self._guard.guarded(self._answer)(request)

    def _empty_channel(self) -> None:
        """Pass on the records of the ring.

        Raises:
            ChannelError: The ring is out of step: no later message can be understood, so another companion must begin.
        """
        received = False
        for message in self._channel.receive_waiting():  # later ones wait until a request was read
            received = True
            try:
                self._pass_on(self._decoder.decode(message))
            except ChannelError:
                raise
            except Exception:  # noqa: BLE001  # the next message may be good
                self._guard.fault()
        if received:
            self._backend.wake()  # until a record is in the run file, it is lost if this process is killed
        dropped = self._channel.dropped
        self._backend.count_dropped(dropped - self._dropped)
        self._dropped = dropped

    def _pass_on(self, record: Record | RunStart) -> None:
        if isinstance(record, RunStart):
            self._identity, self._model = record.identity, record.model
            self._resource.update()
        else:
            if isinstance(record, StepRecord):
                self._unsent_steps.add_received(record)
                if record.kind == "step":
                    self._stall_watch.limit.add_step((record.end_ns - record.start_ns) / 1e9)
            self._backend.append(record)

    def _end_without_stop(self) -> None:
        """Export the records that wait and the steps that were not sent, after the end of the training process."""
        now_ns = time.perf_counter_ns()
        self._guard.guarded(self._empty_channel)()  # again: the process may have sent a record before it ended
        phases = self._page.phases(now_ns)
        cause = self._guard.guarded(self._end_cause.find)() or PROCESS_ENDED
        cause = _with_module(cause, phases, self._page.module)
        for record in self._guard.guarded(self._unsent_steps.records)(phases, now_ns, cause) or ():
            self._backend.append(record)
        self._stop(time.monotonic() + LAST_FLUSH_S, RunEnd(finished=False, error=cause, shut_down=False))

    def _check_each_second(self) -> None:
        """Send the counts if they have changed, and look for kills and stalls."""
        now_s = time.monotonic()
        if now_s < self._check_at_s:
            return
        self._capture_stats = self._page.counts
        self._check_at_s, counts = now_s + CHECK_S, self._counts()
        self._end_cause.refresh()
        estimated = self._backend.spans_estimated
        if counts != self._reported and self._connection.send(counts=counts, spans_estimated=estimated):
            self._reported = counts
        was_stalled = self._stall_watch.is_stalled
        if (stall := self._stall_watch.check(now_s)) is not None:
            self._export_stall(stall)
        elif was_stalled and not self._stall_watch.is_stalled:
            self._backend.set_stalled(stalled=False)
            _logger.warning(STALL_ENDED)
        is_due = self._schedule.is_due(self._stall_watch.quiet_s, self._stall_watch.limit.seconds)
        if is_due and not self._is_reading:  # while C code holds the GIL, no answer comes
            self._is_reading = self._connection.send(read="collectives")

    def _write_unsent(self) -> None:
        """Write the steps that were not sent into the run folder, in case that this process ends with the training."""
        now_ns = time.perf_counter_ns()
        if self._unsent_file is not None:
            phases = self._page.phases(now_ns)
            error = _with_module(PROCESS_ENDED, phases, self._page.module)
            records = self._unsent_steps.records(phases, now_ns, error)
            shown = [(record.kind, record.number, len(record.phases)) for record in records]
            is_open = any(record.error is not None for record in records)
            is_old = is_open and now_ns > self._unsent_ns + UNSENT_NS  # the time of the open step goes on
            if is_old or shown != self._unsent:
                with suppress(RuntimeError):  # no thread can be started
                    if self._unsent_file.write(self._backend.encode_unsent(records)):
                        self._unsent, self._unsent_ns = shown, now_ns

    def _export_stall(self, stall: Stall) -> None:
        """Export the open step or evaluation with the place where it waits, and log the stack."""
        self._backend.set_stalled(stalled=True)
        error = Error(STALLED, describe_frames(stall.frames) if self._with_place else "")
        error = _with_module(error, stall.phases, stall.module)
        record = self._unsent_steps.open_record(stall.phases, stall.seen_ns, error)
        where = stall.phases[-1].kind
        if record is not None:  # else a second companion does not know the number of the step
            self._backend.append(replace(record, kind="stall", alignment=None))  # in its own trace: the step may go on
            where = f"{record.phases[-1].kind} of {record.kind} {record.number}"
        _logger.warning(STALL, where, stall.quiet_s, stall.stack if self._with_place else NO_STACK)

    def _answer(self, request: dict[str, Any]) -> None:
        self._capture_stats = self._page.counts
        if request["ask"] == "flush":
            # On another thread: records go on to arrive while the exporters are flushed.
            threading.Thread(target=self._flush, args=(request,), name="torchotel-flush", daemon=True).start()
        elif request["ask"] == "collectives":
            self._is_reading = False
            quiet_s = self._stall_watch.quiet_s
            if request["reading"] is not None and quiet_s > 0:  # else the training has gone on meanwhile
                self._backend.add_reading(decode_reading(request["reading"])._replace(quiet_s=quiet_s))
        elif request["ask"] == "stop":
            error = None if request["error"] is None else Error(*request["error"])
            self._stop(time.monotonic() + request["timeout_s"], RunEnd(request["finished"], error))
            self._reply(request)
        else:
            self._reply(request)

    def _flush(self, request: dict[str, Any]) -> None:
        complete = self._guard.guarded(self._backend.flush)(request["timeout_s"])
        self._reply(request, complete=bool(complete))

    def _stop(self, deadline_s: float, end: RunEnd) -> None:
        self._stopped = True
        self._backend.set_stalled(stalled=False)
        self._guard.guarded(self._stop_backend)(deadline_s, end)

    def _stop_backend(self, deadline_s: float, end: RunEnd) -> None:
        self._backend.stop(deadline_s, end)
        if self._unsent_file is not None:
            self._unsent_file.remove()

    def _reply(self, request: dict[str, Any], **details: object) -> None:
        about = {"ask": request["ask"], "number": request["number"], "worker": self._backend.worker_state()}
        about |= {"counts": self._counts(), "spans_estimated": self._backend.spans_estimated}
        self._connection.send(**about, **details)

    def _counts(self) -> Stats:
        """Return the counts of this process; the training process adds those of capture."""
        counts = self._backend.stats()
        counts["internal_errors"] -= self._capture_stats.internal_errors
        return counts


class LogForwarder(logging.Handler):
    """Send the records of the logger `torchotel` to the training process, which logs them.

    Args:
        connection: Where they go.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record as text."""
        self._connection.send(log=record.levelno, text=self.format(record))


def main(settings: tuple[Any, ...]) -> None:
    """Run the companion process with the fields of `CompanionSettings`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    load_no_provider()  # the training process has loaded it, or has logged why it cannot
    channel_fd, socket_fd = map(int, sys.argv[1:])
    connection = Connection(socket.socket(fileno=socket_fd))
    _logger.addHandler(LogForwarder(connection))
    _logger.propagate = False
    known = CompanionSettings(*settings)
    _logger.setLevel(known.log_level)
    try:
        process = CompanionProcess(Receiver(channel_fd), connection, known)
        # Until now an error was written to a memory file, which would grow with the messages of libraries.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        process.run()
    except Exception:
        _logger.exception("internal error in the companion process")
        raise


def _with_module(error: Error, phases: Sequence[PagePhase], path: str) -> Error:
    """Add the path of the innermost module call to the error of a forward that has not ended."""
    runs = bool(path and phases) and phases[-1].kind == "forward" and not phases[-1].end_ns
    return error._replace(path=path) if runs else error


def _unsent_file(settings: CompanionSettings) -> UnsentFile | None:
    if settings.run_folder is None or settings.unsent_fd is None:
        return None
    return UnsentFile(Path(settings.run_folder) / UNSENT_NAME, settings.unsent_fd)


def _claims(settings: CompanionSettings) -> Claims:
    run_folder = None
    if settings.run_folder is not None and settings.metrics_fd is not None:
        folder = Path(settings.run_folder)
        run_folder = ClaimedFolder(folder, LineFile(folder / METRICS_NAME, settings.metrics_fd))
    fd = settings.listener_fd
    return Claims(run_folder, None if fd is None else Listener(socket.socket(fileno=fd)))
