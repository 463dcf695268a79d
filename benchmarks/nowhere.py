"""Transports without an endpoint."""

from __future__ import annotations

from torchotel.exporters.otlp.transport import Reply


class Nowhere:
    """Discard all requests."""

    endpoint = "nowhere"

    def pack(self, body: bytes) -> bytes:
        """Return the body unchanged."""
        return body

    def send(self, body: bytes, timeout_s: float | None) -> Reply:
        """Return a success response."""
        return Reply()

    def close(self) -> None:
        """Do nothing, because there is no connection."""


class Kept(Nowhere):
    """Keep all requests, uncompressed."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def send(self, body: bytes, timeout_s: float | None) -> Reply:
        """Keep the request."""
        self.bodies.append(body)
        return Reply()
