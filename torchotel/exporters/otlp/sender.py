"""Send requests on a separate thread, with retries and a log of failures."""

import itertools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from torchotel._limits import MAX_RETRY_S, MAX_WAITING_BYTES, MAX_WAITING_REQUESTS
from torchotel._utils.faults import Warn
from torchotel.config.otlp_endpoint import OtlpEndpoint
from torchotel.exporters.base import ExportStats
from torchotel.exporters.otlp.transport import TRACES, Reply, Signal, Transport
from torchotel.tracing.context import suppressed


def make_transport(otlp_endpoint: OtlpEndpoint, signal: Signal, *, version: str) -> Transport:
    """Create the transport of a signal, which connects with the first request."""
    if otlp_endpoint.protocol == "grpc":
        from torchotel.exporters.otlp.grpc import GrpcTransport  # noqa: PLC0415  # grpc is not needed for HTTP

        return GrpcTransport(otlp_endpoint, signal, version=version)
    from torchotel.exporters.otlp.http import HttpTransport  # noqa: PLC0415  # requests is not needed for gRPC

    return HttpTransport(otlp_endpoint, version=version)


FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 32.0
_SPREAD = 0.25


class RetryPolicy(NamedTuple):
    """Exponential backoff that respects the delays of the endpoint and ends after a time limit."""

    first_backoff_s: float = FIRST_BACKOFF_S
    max_elapsed_s: float = MAX_RETRY_S

    def pause_s(self, reply: Reply, attempts: int, elapsed_s: float, chance: float = 0.5) -> float | None:
        """Return the pause after a failed attempt; None: give up.

        Args:
            reply: Result of the attempt.
            attempts: Number of attempts so far.
            elapsed_s: Time since the start of the first attempt.
            chance: Random number from 0 to 1 that varies the pause, so that many senders do not retry at once.
        """
        if not reply.retry:
            return None
        # The exponent is limited: two to the power of many attempts overflows a float.
        backoff_s = min(self.first_backoff_s * 2.0 ** min(attempts - 1, 64), MAX_BACKOFF_S)
        spread_s = backoff_s * (1 + _SPREAD * (2 * chance - 1))
        # An endpoint may ask for a pause of 0, or until a time in the past.
        asked_s, left_s = reply.retry_after_s or 0.0, self.max_elapsed_s - elapsed_s
        if left_s <= 0 or asked_s > left_s:
            return None
        return min(max(spread_s, asked_s), left_s)  # the last attempt is at the end of the time limit


DEFAULT_RETRY = RetryPolicy()


QUIET_S = 3600.0
"""Time after a warning in which failures of the same cause are only counted: an endpoint may fail again and again."""
_HEADERS = "Check OTEL_EXPORTER_OTLP_HEADERS."
_BUSY = "The request is sent again for up to {limit:g} seconds. Read the log of that server."
_PAUSED = (
    "It asks for a pause of {pause:g} seconds. "
    "A request is kept for {limit:g} seconds, so {items} are dropped meanwhile."
)
_PATH = "Check its path: OTEL_EXPORTER_OTLP_ENDPOINT is a base URL, to which /v1/{name} is added."
_ADVICE = {
    "401": _HEADERS,
    "403": _HEADERS,
    "UNAUTHENTICATED": _HEADERS,
    "PERMISSION_DENIED": _HEADERS,
    "404": _PATH,
    "405": _PATH,
    "no_otlp": "Check its port: 4318 of a Collector or Jaeger takes OTLP over HTTP, 16686 is Jaeger's page.",
    "UNIMPLEMENTED": "It speaks gRPC, but no {name}: set OTEL_EXPORTER_OTLP_{NAME}_ENDPOINT or OTEL_{NAME}_EXPORTER.",
}
_ADVICE_ANSWERED = (
    "Check OTEL_EXPORTER_OTLP_ENDPOINT, its path and OTEL_EXPORTER_OTLP_HEADERS, and read the log of that server."
)
_ADVICE_UNANSWERED = (
    "Start a Collector or Jaeger there (4318 is for http/protobuf, 4317 for grpc), set OTEL_EXPORTER_OTLP_ENDPOINT "
    "and OTEL_EXPORTER_OTLP_PROTOCOL, or set OTEL_{NAME}_EXPORTER=none."
)
_FILES = (
    "A certificate or key file cannot be used: check OTEL_EXPORTER_OTLP_CERTIFICATE, "
    "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and OTEL_EXPORTER_OTLP_CLIENT_KEY."
)
_CLOSED = (
    "The server closed the connection: it may require a client certificate (OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE), "
    "or another protocol (OTEL_EXPORTER_OTLP_PROTOCOL)."
)
_ADVICE_ON_WORDS = {
    # OpenSSL's, with both protocols.
    "CERTIFICATE_VERIFY_FAILED": "Name the authority that signed its certificate in OTEL_EXPORTER_OTLP_CERTIFICATE.",
    "WRONG_VERSION_NUMBER": "It speaks no TLS: write http:// before the endpoint.",
    "NO_CERTIFICATE_OR_CRL_FOUND": _FILES,
    "PEM lib": _FILES,
    "KEY_VALUES_MISMATCH": _FILES,
    "CERTIFICATE_REQUIRED": _CLOSED,
    "EOF occurred in violation of protocol": _CLOSED,
    # gRPC's, while connecting.
    "Failed to create security handshaker": _FILES,
    "Socket closed": _CLOSED,
    # urllib3's, after the connection was accepted.
    "ReadTimeout": (
        "A server accepted the connection and did not answer: check that it receives OTLP at this port, or set a "
        "longer OTEL_EXPORTER_OTLP_TIMEOUT."
    ),
    # Python's, for a response that is not HTTP.
    "BadStatusLine": "gRPC may be spoken there: set OTEL_EXPORTER_OTLP_PROTOCOL=grpc, or name the port of HTTP, 4318.",
}
"""Advice by a part of the error's text, which is more precise than its type."""
_logger = logging.getLogger("torchotel")


class FailureLog:
    """Log the start and the end of failures of one endpoint. An object is used by one thread.

    Args:
        endpoint: Address without credentials.
        signal: The exported signal.
        limit_s: Time for which a request is retried.
    """

    def __init__(self, endpoint: str, signal: Signal, limit_s: float) -> None:
        self._endpoint, self._signal, self._limit_s = endpoint, signal, limit_s
        self._failing = False
        self._warn = Warn(QUIET_S)

    def failed(self, error_type: str, reply: Reply) -> None:
        """Warn of a failure; later failures of the same cause are only counted."""
        paused = (reply.retry_after_s or 0.0) > self._limit_s
        advice = self._advice(error_type, reply).format(
            name=self._signal.name,
            NAME=self._signal.name.upper(),
            items=self._signal.items,
            limit=self._limit_s,
            pause=reply.retry_after_s,
        )
        message = "Could not send %s to %s: %s. Training is not affected. %s"
        cause = f"{error_type} paused" if paused else error_type
        if self._warn(message, self._signal.items, self._endpoint, reply.text, advice, key=cause):
            self._failing = True

    def _advice(self, error_type: str, reply: Reply) -> str:
        if reply.answered and reply.retry:
            return _PAUSED if (reply.retry_after_s or 0.0) > self._limit_s else _BUSY
        advice = next((advice for words, advice in _ADVICE_ON_WORDS.items() if words in reply.text), None)
        return advice or _ADVICE.get(error_type, _ADVICE_ANSWERED if reply.answered else _ADVICE_UNANSWERED)

    def rejected(self, count: int, text: str) -> None:
        """Warn that the endpoint rejected items of an accepted request."""
        reason = text or "it gave no reason"
        self._warn("%s rejected %d %s: %s", self._endpoint, count, self._signal.items, reason)

    def advised(self, text: str) -> None:
        """Log the warning of an endpoint that accepted a request."""
        self._warn("%s accepted the %s with a warning: %s", self._endpoint, self._signal.items, text)

    def overflowed(self) -> None:
        """Warn that requests are dropped because too many wait; from any thread."""
        self._warn(
            "%s does not accept %s as fast as they are produced, so the oldest are dropped (`spans_dropped` in stats() "
            "counts them). Read the log of that server, or record less detail.",
            self._endpoint,
            self._signal.items,
        )

    def unsent(self, requests: int, spans: int) -> None:
        """Warn that requests were dropped at the deadline of `shutdown`."""
        lost = f"{spans} spans" if spans else f"{requests} requests of {self._signal.items}"
        self._warn(
            "%s were not sent to %s before the deadline of shutdown and are dropped. Check that the endpoint answers, "
            "or call shutdown() with a longer timeout_s.",
            lost,
            self._endpoint,
        )

    def recovered(self) -> None:
        """Log that the endpoint accepts requests again, if a failure was logged."""
        if self._failing:
            self._failing = False
            with suppress(Exception):  # a handler of the program may raise
                _logger.info("%s reach %s again", self._signal.items.capitalize(), self._endpoint)


_random = random.Random()  # noqa: S311  # not a secret; the global generator belongs to the program

CLOSING_BACKOFF_S = 0.5
"""Longest pause between attempts in `shutdown`, if the endpoint responds but does not accept the request."""


class _Request(NamedTuple):
    body: bytes
    spans: int
    traces: Sequence[int]


class Sender:
    """Send requests in order, with retries. If too many requests wait, the oldest are dropped.

    Every span is counted once, as exported or dropped. The thread starts with the first request. An attempt cannot be
    interrupted: if an endpoint accepts a connection and does not respond, the idle thread outlives `shutdown` by up to
    the timeout of the transport.

    Args:
        transport: Connection to the endpoint.
        stats: Counts spans and failures.
        signal: The exported signal.
        max_requests: Requests that may wait.
        max_bytes: Bytes that may wait.
        retry: Policy of retries.
    """

    def __init__(
        self,
        transport: Transport,
        stats: ExportStats,
        *,
        signal: Signal = TRACES,
        max_requests: int = MAX_WAITING_REQUESTS,
        max_bytes: int = MAX_WAITING_BYTES,
        retry: RetryPolicy = DEFAULT_RETRY,
    ) -> None:
        self._transport = transport
        self._stats = stats
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._retry = retry
        self._signal = signal
        self._failure_log = FailureLog(transport.endpoint, signal, retry.max_elapsed_s)
        self._changed = threading.Condition()
        self._waiting: deque[_Request] = deque()
        self._waiting_bytes = 0
        self._in_flight: _Request | None = None
        self._thread: threading.Thread | None = None
        self._warn = Warn()
        self._has_dropped = False
        """Whether items were dropped since the last `flush`."""
        self._not_before_s = 0.0
        """Time before which the endpoint wants no request; used by the sender thread."""
        self._deadline_s: float | None = None
        """Set by `shutdown`: new requests are dropped, and no attempt starts after the deadline."""

    def put(self, body: bytes, spans: int, traces: Sequence[int] = ()) -> None:
        """Add a request, its number of spans (0 for metrics) and the ids of the traces whose roots it has.

        It is compressed here, because while an endpoint does not respond, requests wait for a minute.
        """
        try:
            body = self._transport.pack(body)
        except Exception as error:  # noqa: BLE001  # raised further, the spans would be lost and not counted
            self._fault(error)
            with self._changed:
                self._drop(spans)
            return
        with self._changed:
            if self._deadline_s is not None:
                self._drop(spans)
                return
            is_full = False
            while self._waiting and (
                len(self._waiting) >= self._max_requests or self._waiting_bytes + len(body) > self._max_bytes
            ):
                is_full = True
                self._stats.error("queue_full")
                self._drop(self._pop().spans, queue=True)
            self._waiting.append(_Request(body, spans, traces))
            self._waiting_bytes += len(body)
            self._start()
            self._changed.notify_all()
        if is_full:
            self._failure_log.overflowed()

    def discard_waiting(self) -> None:
        """Discard the waiting requests because newer requests replace them; not counted as dropped."""
        with self._changed:
            self._waiting.clear()
            self._waiting_bytes = 0
            self._changed.notify_all()

    @property
    def is_busy(self) -> bool:
        """Whether a request is being sent or waits."""
        return not self._is_idle()

    def flush(self, deadline_s: float) -> bool:
        """Wait until all requests are sent. Return False on timeout or if items were dropped since the last flush."""
        with self._changed:
            if self._waiting and self._thread is None:
                return False
            idle = self._changed.wait_for(self._is_idle, max(0.0, deadline_s - time.monotonic()))
            dropped, self._has_dropped = self._has_dropped, False
            return idle and not dropped

    def shutdown(self, deadline_s: float) -> None:
        """Send the waiting requests by the deadline and drop the others; try each once if unreachable."""
        with self._changed:
            if self._deadline_s is None:
                self._deadline_s = deadline_s
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        elif self._waiting:
            self._run()  # the interpreter is ending and starts no threads
        with self._changed:
            unsent = [self._pop() for _ in range(len(self._waiting))]
            if self._in_flight is not None:
                unsent.append(self._in_flight)
                self._in_flight = None  # it is counted as dropped, whatever the result
            for request in unsent:
                self._drop(request.spans)
            self._changed.notify_all()
        if unsent:
            self._failure_log.unsent(len(unsent), sum(request.spans for request in unsent))

    def _is_idle(self) -> bool:
        return not self._waiting and self._in_flight is None

    def _pop(self) -> _Request:
        request = self._waiting.popleft()
        self._waiting_bytes -= len(request.body)
        return request

    def _drop(self, spans: int, *, queue: bool = False) -> None:
        self._has_dropped = True
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
                except Exception as error:  # noqa: BLE001  # the thread must not end
                    self._fault(error)
                    reply = Reply(error_type=type(error).__name__)
                self._count_result(request, reply)
            with suppress(Exception):  # the requests are sent
                self._transport.close()

    def _fault(self, error: Exception) -> None:
        """Log an internal error, and count it."""
        self._stats.error(type(error).__name__)
        text = "Could not send %s to %s; further such errors are only counted"
        self._warn(text, self._signal.items, self._transport.endpoint, error=error)

    def _next(self) -> _Request | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._deadline_s is not None)
            self._in_flight = self._pop() if self._waiting else None
            return self._in_flight

    def _deliver(self, request: _Request) -> Reply:
        if not self._may_send():
            self._stats.error("throttled")
            return Reply("throttled")
        start_s = time.monotonic()
        for attempts in itertools.count(1):
            reply = self._transport.send(request.body, self._time_left_s())
            if reply.error_type is None:
                return reply
            self._stats.error(reply.error_type)
            self._failure_log.failed(reply.error_type, reply)
            if reply.retry_after_s is not None:
                self._not_before_s = time.monotonic() + reply.retry_after_s
            pause_s = self._retry.pause_s(reply, attempts, time.monotonic() - start_s, _random.random())
            if pause_s is None or not self._pause(reply, pause_s):
                return reply
        raise AssertionError("attempts never end")

    def _count_result(self, request: _Request, reply: Reply) -> None:
        dropped = request.spans if reply.error_type is not None else min(reply.rejected, request.spans)
        if reply.error_type is None:
            self._failure_log.recovered()
        if reply.rejected:
            self._stats.error("rejected")
            self._failure_log.rejected(reply.rejected, reply.text)
        elif reply.error_type is None and reply.text:
            self._failure_log.advised(reply.text)
        with self._changed:
            if self._in_flight is request:  # else `shutdown` has counted the request
                self._in_flight = None
                # The response does not name the rejected spans, so none of the request's traces counts as exported.
                self._stats.exported(request.spans - dropped, () if dropped else request.traces)
                if reply.error_type is not None or reply.rejected:
                    self._drop(dropped)
                self._changed.notify_all()

    def _time_left_s(self) -> float | None:
        # A little less, so that the thread ends before `shutdown` stops waiting for it.
        deadline_s = self._deadline_s
        return None if deadline_s is None else (deadline_s - time.monotonic()) * 0.9

    def _pause(self, reply: Reply, pause_s: float) -> bool:
        """Wait for the next attempt; return False to give up."""
        with self._changed:
            if self._deadline_s is None:
                # `shutdown` ends the pause, for one last attempt.
                self._changed.wait_for(lambda: self._deadline_s is not None, pause_s)
            elif not reply.answered:
                return False  # unreachable, and `shutdown` waits
            elif not self._wait_until(time.monotonic() + min(pause_s, CLOSING_BACKOFF_S)):
                return False
            return self._wait_until(self._not_before_s)

    def _may_send(self) -> bool:
        """Wait until the endpoint wants requests again; return False if that is too late."""
        with self._changed:
            too_late_s = time.monotonic() + self._retry.max_elapsed_s
            return self._not_before_s <= too_late_s and self._wait_until(self._not_before_s)

    def _wait_until(self, due_s: float) -> bool:
        """Wait until a time; return False if the deadline of `shutdown` is earlier."""
        self._changed.wait_for(lambda: self._deadline_s is not None, due_s - time.monotonic())
        if self._deadline_s is None:
            return True
        if due_s > self._deadline_s:
            return False
        self._changed.wait_for(lambda: self._in_flight is None, due_s - time.monotonic())
        return self._in_flight is not None
