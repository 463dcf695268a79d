"""When a request that did not arrive is tried again."""

from typing import NamedTuple

from torchotel.exporters.otlp.transport import Reply

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 32.0
MAX_ELAPSED_S = 64.0
"""A request that cannot be delivered for so long is given up."""
_SPREAD = 0.25


class RetryPolicy(NamedTuple):
    """Pauses that double, are never shorter than an endpoint asks, and end in time."""

    first_backoff_s: float = FIRST_BACKOFF_S
    max_elapsed_s: float = MAX_ELAPSED_S

    def pause_s(self, reply: Reply, attempts: int, elapsed_s: float, chance: float = 0.5) -> float | None:
        """Say how long to rest after a failure; None: it was the last attempt.

        Args:
            reply: What came of the attempt.
            attempts: How many there were, this one included.
            elapsed_s: Time since the request's first attempt began.
            chance: From 0 to 1, by which a pause is spread where others rest too: they must not come back all at once.
        """
        if not reply.retry:
            return None
        # Limited first: a number of two to the power of many attempts is no float any more.
        backoff_s = min(self.first_backoff_s * 2.0 ** min(attempts - 1, 64), MAX_BACKOFF_S)
        spread_s = backoff_s * (1 + _SPREAD * (2 * chance - 1))
        # An endpoint that asks for no pause, or says a time that is over, would else be called without any.
        pause_s = max(spread_s, reply.retry_after_s or 0.0)
        return pause_s if elapsed_s + pause_s <= self.max_elapsed_s else None


DEFAULT_RETRY = RetryPolicy()
