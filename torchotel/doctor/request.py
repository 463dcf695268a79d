"""What is sent to an endpoint, and how long anybody waits for it."""

from typing import Any, NamedTuple

from torchotel._receiver import Receiver
from torchotel.exporters.otlp.signals import Signal

_MOST_STEP_S = 5.0
"""Longest wait in each step on the way to an endpoint."""
_MOST_TIMEOUT_S = 10.0
"""Longest wait for its answer, where the configured timeout is longer."""


class Request(NamedTuple):
    """One request, and who takes it."""

    subject: str
    """Of the findings."""
    receiver: Receiver
    signal: Signal
    body: bytes
    response: Any
    """OTLP's message type of the answer."""
    version: str
    """Of torchotel."""

    @property
    def step_s(self) -> float:
        """Longest wait in each step on the way there."""
        return min(self.receiver.timeout_s, _MOST_STEP_S)

    @property
    def limit_s(self) -> float:
        """Longest wait for its answer."""
        return min(self.receiver.timeout_s, _MOST_TIMEOUT_S)
