"""Say once that an endpoint fails, and once that it is back."""

import logging
import time

QUIET_S = 3600.0
"""After a warning, outages are only counted for this long: an endpoint that flaps must not fill the log."""
_ADVICE = {
    "401": "Check OTEL_EXPORTER_OTLP_HEADERS.",
    "403": "Check OTEL_EXPORTER_OTLP_HEADERS.",
    "404": "Check its path: OTEL_EXPORTER_OTLP_ENDPOINT is a base URL, to which /v1/traces is added.",
}
_ADVICE_ELSE = "Start a Collector or Jaeger there, set OTEL_EXPORTER_OTLP_ENDPOINT, or set OTEL_TRACES_EXPORTER=none."
_logger = logging.getLogger("torchotel")


class OutageLog:
    """Log the beginning and the end of an outage of one endpoint; on one thread."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._warned = False
        self._quiet_until_s: dict[str, float] = {}

    def failed(self, error_type: str, text: str) -> None:
        """Warn at the first failure; training goes on, and so the rest is for the counters."""
        advice = _ADVICE.get(error_type, _ADVICE_ELSE)
        if self._warn("Could not send spans to %s: %s. Training is not affected. %s", text, advice):
            self._warned = True

    def rejected(self, spans: int, text: str) -> None:
        """Warn that an endpoint took a request but not all of its spans."""
        self._warn("%s rejected %d spans: %s", spans, text or "it gave no reason")

    def recovered(self) -> None:
        """Say that the endpoint takes spans again, where it was warned about."""
        if self._warned:
            self._warned = False
            _logger.info("Spans reach %s again", self._endpoint)

    def _warn(self, message: str, *args: object) -> bool:
        now_s = time.monotonic()
        if now_s < self._quiet_until_s.get(message, now_s):
            return False
        self._quiet_until_s[message] = now_s + QUIET_S
        _logger.warning(message, self._endpoint, *args)
        return True
