"""A thread that brings encoded requests to an endpoint and never lets anybody wait for it."""

import itertools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from torchotel.exporters.otlp.outage import OutageLog
from torchotel.exporters.otlp.retry import DEFAULT_RETRY, RetryPolicy
from torchotel.exporters.otlp.signals import TRACES, Signal
from torchotel.exporters.otlp.transport import Reply, Transport
from torchotel.exporters.stats import ExportStats
from torchotel.tracing.context import suppressed

_random = random.Random()  # noqa: S311  # no secret; the global one is the program's
_logger = logging.getLogger("torchotel")

MAX_REQUESTS = 64
MAX_BYTES = 32 * 1024 * 1024
CLOSING_BACKOFF_S = 0.5
"""Longest pause of our own in `shutdown`, while an endpoint answers but does not take the request."""


class _Request(NamedTuple):
    body: bytes
    spans: int
    traces: Sequence[int]


class Sender:
    """Send requests in order, again and again where that may help; drop the oldest where too many wait.

    Every span is counted once, as exported or dropped. The thread starts with the first request. An attempt
    under way cannot be broken off: where an endpoint takes a connection and says nothing, the thread outlives
    `shutdown` by up to the transport's timeout, with nothing left to do.

    Args:
        transport: The way to the endpoint.
        stats: Where spans and failures are counted.
        signal: What the requests hold.
        max_requests: Requests that may wait.
        max_bytes: Bytes that may wait, before compression.
        retry: When a request is tried again, and when it is given up.
    """

    def __init__(
        self,
        transport: Transport,
        stats: ExportStats,
        *,
        signal: Signal = TRACES,
        max_requests: int = MAX_REQUESTS,
        max_bytes: int = MAX_BYTES,
        retry: RetryPolicy = DEFAULT_RETRY,
    ) -> None:
        self._transport = transport
        self._stats = stats
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._retry = retry
        self._signal = signal
        self._outage = OutageLog(transport.endpoint, signal)
        self._changed = threading.Condition()
        self._waiting: deque[_Request] = deque()
        self._waiting_bytes = 0
        self._under_way: _Request | None = None
        self._thread: threading.Thread | None = None
        self._complained = False
        self._lost = False
        """Whether a request was lost since the last `flush`, or a part of one."""
        self._not_before_s = 0.0
        """When the endpoint wants to be called again; on the thread."""
        self._deadline_s: float | None = None
        """Set by `shutdown`: no request is taken any more, and none attempted later."""

    def put(self, body: bytes, spans: int, traces: Sequence[int] = ()) -> None:
        """Take a request, with the ids of the traces whose roots are in it; one of metrics has no spans to count."""
        with self._changed:
            if self._deadline_s is not None:
                self._drop(spans)
                return
            while self._waiting and (
                len(self._waiting) >= self._max_requests or self._waiting_bytes + len(body) > self._max_bytes
            ):
                self._stats.error("queue_full")
                self._drop(self._take().spans, queue=True)
            self._waiting.append(_Request(body, spans, traces))
            self._waiting_bytes += len(body)
            self._start()
            self._changed.notify_all()

    def flush(self, deadline_s: float) -> bool:
        """Wait until all is sent; False if it was not by `deadline_s`, or if spans were lost meanwhile."""
        with self._changed:
            if self._waiting and self._thread is None:
                return False
            idle = self._changed.wait_for(self._is_idle, max(0.0, deadline_s - time.monotonic()))
            lost, self._lost = self._lost, False
            return idle and not lost

    def shutdown(self, deadline_s: float) -> None:
        """Send what waits by `deadline_s` and drop the rest; where nobody answers after one attempt each."""
        with self._changed:
            if self._deadline_s is None:
                self._deadline_s = deadline_s
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        elif self._waiting:
            self._run()  # at the interpreter's end no thread can be started any more
        with self._changed:
            unsent = [self._take() for _ in range(len(self._waiting))]
            if self._under_way is not None:
                unsent.append(self._under_way)
                self._under_way = None  # whatever comes of the attempt, it is counted now
            for request in unsent:
                self._drop(request.spans)
            self._changed.notify_all()
        if unsent:
            self._outage.unsent(len(unsent), sum(request.spans for request in unsent))

    def _is_idle(self) -> bool:
        return not self._waiting and self._under_way is None

    def _take(self) -> _Request:
        request = self._waiting.popleft()
        self._waiting_bytes -= len(request.body)
        return request

    def _drop(self, spans: int, *, queue: bool = False) -> None:
        self._lost = True
        self._stats.dropped(spans, queue=queue)

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="torchotel-sender", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is ending: `shutdown` sends
                return
            self._thread = thread

    def _run(self) -> None:
        with suppressed():
            while (request := self._next()) is not None:
                try:
                    reply = self._deliver(request)
                except Exception as error:  # noqa: BLE001  # the thread must go on
                    self._complain(error)
                    reply = Reply(error_type=type(error).__name__)
                    self._stats.error(type(error).__name__)
                self._settle(request, reply)
            with suppress(Exception):  # nobody is left to tell
                self._transport.close()

    def _complain(self, error: Exception) -> None:
        """Tell of an error of our own, once: the next request may be good."""
        if self._complained:
            return
        self._complained = True
        with suppress(Exception):  # a handler of the user's may raise
            _logger.error(
                "Could not send %s to %s; further such errors are only counted",
                self._signal.items,
                self._transport.endpoint,
                exc_info=error,
            )

    def _next(self) -> _Request | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._deadline_s is not None)
            self._under_way = self._take() if self._waiting else None
            return self._under_way

    def _deliver(self, request: _Request) -> Reply:
        if not self._may_send():
            self._stats.error("throttled")
            return Reply("throttled")
        body = self._transport.pack(request.body)
        began_s = time.monotonic()
        for attempts in itertools.count(1):
            reply = self._transport.send(body, self._time_left_s())
            if reply.error_type is None:
                return reply
            self._stats.error(reply.error_type)
            self._outage.failed(reply.error_type, reply.text, answered=reply.answered)
            if reply.retry_after_s is not None:
                self._not_before_s = time.monotonic() + reply.retry_after_s
            pause_s = self._retry.pause_s(reply, attempts, time.monotonic() - began_s, _random.random())
            if pause_s is None or not self._rest(reply, pause_s):
                return reply
        raise AssertionError("attempts never end")

    def _settle(self, request: _Request, reply: Reply) -> None:
        lost = request.spans if reply.error_type is not None else min(reply.rejected, request.spans)
        if reply.error_type is None:
            self._outage.recovered()
        if reply.rejected:
            self._stats.error("rejected")
            self._outage.rejected(reply.rejected, reply.text)
        elif reply.error_type is None and reply.text:
            self._outage.advised(reply.text)
        with self._changed:
            if self._under_way is request:  # else `shutdown` has counted it
                self._under_way = None
                # Which spans of a request were rejected is not told, so none of its traces counts as arrived.
                self._stats.exported(request.spans - lost, () if lost else request.traces)
                if reply.error_type is not None or reply.rejected:
                    self._drop(lost)
                self._changed.notify_all()

    def _time_left_s(self) -> float | None:
        # A little less than there is, so that the thread ends before `shutdown` stops waiting for it.
        deadline_s = self._deadline_s
        return None if deadline_s is None else (deadline_s - time.monotonic()) * 0.9

    def _rest(self, reply: Reply, pause_s: float) -> bool:
        """Wait until the next attempt is due; False where there will be none."""
        with self._changed:
            if self._deadline_s is None:
                # `shutdown` cuts our own pause short, for one last chance.
                self._changed.wait_for(lambda: self._deadline_s is not None, pause_s)
            elif not reply.answered:
                return False  # nobody is there, and somebody waits for the program's end
            elif not self._wait_until(time.monotonic() + min(pause_s, CLOSING_BACKOFF_S)):
                return False
            return self._wait_until(self._not_before_s)

    def _may_send(self) -> bool:
        """Wait as long as the endpoint asked for, whichever request it was; False where that is too long."""
        with self._changed:
            too_late_s = time.monotonic() + self._retry.max_elapsed_s
            return self._not_before_s <= too_late_s and self._wait_until(self._not_before_s)

    def _wait_until(self, due_s: float) -> bool:
        """Wait; False where nothing may be sent then, for `shutdown` has another deadline."""
        self._changed.wait_for(lambda: self._deadline_s is not None, due_s - time.monotonic())
        if self._deadline_s is None:
            return True
        if due_s > self._deadline_s:
            return False
        self._changed.wait_for(lambda: self._under_way is None, due_s - time.monotonic())
        return self._under_way is not None
