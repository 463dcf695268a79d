"""Say once that an endpoint fails, and once that it is back."""

import logging
import time
from contextlib import suppress

from torchotel.exporters.otlp.signals import Signal

QUIET_S = 3600.0
"""After a warning, failures of the same cause are only counted for this long: one that flaps must not fill the log."""
_HEADERS = "Check OTEL_EXPORTER_OTLP_HEADERS."
_BUSY = "The request is sent again for up to 64 seconds. Read the log of that server."
_PATH = "Check its path: OTEL_EXPORTER_OTLP_ENDPOINT is a base URL, to which /v1/{name} is added."
_ADVICE = {
    "401": _HEADERS,
    "403": _HEADERS,
    "UNAUTHENTICATED": _HEADERS,
    "PERMISSION_DENIED": _HEADERS,
    "404": _PATH,
    "405": _PATH,
    **dict.fromkeys(("429", "502", "503", "504"), _BUSY),
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
_ADVICE_ON_WORDS = {
    # OpenSSL's, under both protocols.
    "CERTIFICATE_VERIFY_FAILED": "Name the authority that signed its certificate in OTEL_EXPORTER_OTLP_CERTIFICATE.",
    "WRONG_VERSION_NUMBER": "It speaks no TLS: write http:// before the endpoint.",
    # Python's, for an answer that does not begin as HTTP does.
    "BadStatusLine": "gRPC may be spoken there: set OTEL_EXPORTER_OTLP_PROTOCOL=grpc, or name the port of HTTP, 4318.",
}
"""Where the words of a failure say more than its type."""
_logger = logging.getLogger("torchotel")


class OutageLog:
    """Log the beginning and the end of an outage of one endpoint; on one thread.

    Args:
        endpoint: Its name, without credentials.
        signal: What is sent there.
    """

    def __init__(self, endpoint: str, signal: Signal) -> None:
        self._endpoint, self._signal = endpoint, signal
        self._warned = False
        self._quiet_until_s: dict[str, float] = {}

    def failed(self, error_type: str, text: str, *, answered: bool) -> None:
        """Warn at the first failure of its kind; training goes on, and so the rest is for the counters."""
        name = self._signal.name
        told = next((advice for words, advice in _ADVICE_ON_WORDS.items() if words in text), None)
        otherwise = _ADVICE_ANSWERED if answered else _ADVICE_UNANSWERED
        advice = (told or _ADVICE.get(error_type, otherwise)).format(name=name, NAME=name.upper())
        message = "Could not send %s to %s: %s. Training is not affected. %s"
        if self._warn(error_type, message, self._signal.items, self._endpoint, text, advice):
            self._warned = True

    def rejected(self, count: int, text: str) -> None:
        """Warn that an endpoint took a request but not all that is in it."""
        reason = text or "it gave no reason"
        self._warn("rejected", "%s rejected %d %s: %s", self._endpoint, count, self._signal.items, reason)

    def advised(self, text: str) -> None:
        """Pass on what an endpoint says of a request that it took whole."""
        self._warn("advised", "%s took the %s, and says: %s", self._endpoint, self._signal.items, text)

    def unsent(self, requests: int, spans: int) -> None:
        """Warn that requests were dropped because `shutdown` had no time left for them."""
        lost = f"{spans} spans" if spans else f"{requests} requests of {self._signal.items}"
        self._warn(
            "unsent",
            "%s were not sent to %s before the deadline of shutdown and are dropped. Check that the endpoint answers, "
            "or call shutdown() with a longer timeout_s.",
            lost,
            self._endpoint,
        )

    def recovered(self) -> None:
        """Say that the endpoint takes requests again, where it was warned about."""
        if self._warned:
            self._warned = False
            with suppress(Exception):  # a handler of the user's may raise, and the thread must go on
                _logger.info("%s reach %s again", self._signal.items.capitalize(), self._endpoint)

    def _warn(self, cause: str, message: str, *args: object) -> bool:
        now_s = time.monotonic()
        if now_s < self._quiet_until_s.get(cause, now_s):
            return False
        self._quiet_until_s[cause] = now_s + QUIET_S
        with suppress(Exception):  # as above
            _logger.warning(message, *args)
        return True
