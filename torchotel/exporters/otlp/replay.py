"""Send what was recorded earlier, and wait for each request's end."""

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
    """Bring requests of OTLP/JSON to an endpoint, one after the other, until one cannot be delivered.

    Nobody trains meanwhile, so nothing is dropped to save time: a request that the endpoint asks to send again is sent
    again as `retry` says. Where not even the first request finds anybody there, nothing is tried again.
    """

    transport: Transport
    retry: RetryPolicy = DEFAULT_RETRY
    sleep: Callable[[float], object] = time.sleep
    arrived: int = 0
    """Spans that the endpoint took."""
    rejected: int = 0
    """Spans that it did not want, of requests that it took."""
    failure: str = ""
    """Why nothing further was sent, or why spans were rejected; empty where all arrived."""
    _spans: int = 0
    _body: bytes = b""
    _answered: bool = False

    def take(self, request: Mapping[str, Any]) -> bool:
        """Add a request to what is sent; False when there is no sense in going on.

        Raises:
            from_json.FOREIGN: The request is not of the form that torchotel writes.
        """
        for part in list(parts(request, MAX_REQUEST_SPANS, MAX_REQUEST_BYTES)):
            too_much = len(self._body) + len(part.body) > MAX_REQUEST_BYTES
            if (too_much or self._spans + part.spans > MAX_REQUEST_SPANS) and not self.push():
                return False
            self._body += part.body
            self._spans += part.spans
        return True

    def push(self) -> bool:
        """Send what was taken; False where that could not be."""
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
        began_s = time.monotonic()
        for attempts in itertools.count(1):
            reply = self.transport.send(body, None)
            self._answered = self._answered or reply.answered
            if reply.error_type is None or not self._answered:
                return reply
            pause_s = self.retry.pause_s(reply, attempts, time.monotonic() - began_s)
            if pause_s is None:
                return reply
            self.sleep(pause_s)
        raise AssertionError("attempts never end")
