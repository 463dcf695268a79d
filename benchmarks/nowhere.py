"""Transports that lead nowhere, for what is measured without an endpoint."""

from __future__ import annotations

from torchotel.exporters.otlp.transport import Reply


class Nowhere:
    """Take all and keep nothing."""

    endpoint = "nowhere"

    def pack(self, body: bytes) -> bytes:
        """Leave it as it is."""
        return body

    def send(self, body: bytes, timeout_s: float | None) -> Reply:
        """Say that it was taken."""
        return Reply()

    def close(self) -> None:
        """Do nothing: there is no connection."""


class Kept(Nowhere):
    """Keep all requests, uncompressed."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def send(self, body: bytes, timeout_s: float | None) -> Reply:
        """Keep it."""
        self.bodies.append(body)
        return Reply()
