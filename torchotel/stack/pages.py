"""Whether a server shows pages: one that was built from Go modules answers its API alone."""

from __future__ import annotations

from torchotel.stack.health import fetched
from torchotel.stack.servers import Server

_PLACEHOLDER = b"This is a placeholder for the Jaeger UI home page"


def shows_page(server: Server) -> bool:
    """Look at its page; Jaeger shows another in its place, and Prometheus fails."""
    page = fetched(server.address)
    return page is not None and _PLACEHOLDER not in page
