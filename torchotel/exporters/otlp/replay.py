"""Send a recorded run to an endpoint, one request after the other."""

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchotel._limits import MAX_REQUEST_BYTES, MAX_REQUEST_SPANS
from torchotel.exporters.otlp.json_to_protobuf import parts
from torchotel.exporters.otlp.sender import DEFAULT_RETRY, RetryPolicy
from torchotel.exporters.otlp.transport import Reply, Transport


@dataclass
class Replay:
    """Send OTLP/JSON requests to an endpoint until one cannot be delivered.

    No training runs meanwhile, so no request is dropped to save time: requests are retried by the policy `retry`. If
    the endpoint does not respond to the first request, there are no retries.
    """

    transport: Transport
    retry: RetryPolicy = DEFAULT_RETRY
    sleep: Callable[[float], object] = time.sleep
    arrived: int = 0
    """Spans that the endpoint accepted."""
    rejected: int = 0
    """Spans that the endpoint rejected from accepted requests."""
    failure: str = ""
    """Why sending stopped or spans were rejected; empty: all spans were accepted."""
    _spans: int = 0
    _body: bytes = b""
    _answered: bool = False

    def add(self, request: Mapping[str, Any]) -> bool:
        """Add a request; return False if sending has failed.

        Raises:
            json_to_protobuf.FOREIGN: torchotel writes no such request.
        """
        for part in list(parts(request, MAX_REQUEST_SPANS, MAX_REQUEST_BYTES)):
            too_much = len(self._body) + len(part.body) > MAX_REQUEST_BYTES
            if (too_much or self._spans + part.spans > MAX_REQUEST_SPANS) and not self.push():
                return False
            self._body += part.body
            self._spans += part.spans
        return True

    def push(self) -> bool:
        """Send the spans that were added; return False if sending failed."""
        if not self._spans:
            return True
        spans, body, self._spans, self._body = self._spans, self._body, 0, b""
        reply = self._deliver(self.transport.pack(body))
        if reply.error_type is not None:
            self.failure = reply.text
            return False
        rejected = min(reply.rejected, spans)
        if rejected:
            self.failure = reply.text or "the endpoint gave no reason"
        self.rejected += rejected
        self.arrived += spans - rejected
        return True

    def _deliver(self, body: bytes) -> Reply:
        start_s = time.monotonic()
        for attempts in itertools.count(1):
            reply = self.transport.send(body, None)
            self._answered = self._answered or reply.answered
            if reply.error_type is None or not self._answered:
                return reply
            pause_s = self.retry.pause_s(reply, attempts, time.monotonic() - start_s)
            if pause_s is None:
                return reply
            self.sleep(pause_s)
        raise AssertionError("attempts never end")
