"""What the tests of senders share."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torchotel.config.otlp_endpoint import OtlpCompression, OtlpEndpoint
from torchotel.exporters.base import ExportStats
from torchotel.exporters.otlp.http import HttpTransport
from torchotel.exporters.otlp.sender import RetryPolicy, Sender


def sender_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "torchotel-sender"]


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def http(
    url: str, timeout_s: float = 5.0, compression: OtlpCompression = "gzip", headers: Mapping[str, str] | None = None
) -> HttpTransport:
    receiver = OtlpEndpoint(url, headers=headers or {}, compression=compression, timeout_s=timeout_s)
    return HttpTransport(receiver, version="1.2")


@contextmanager
def sending(url: str, timeout_s: float = 5.0, backoff_s: float = 0.01) -> Iterator[tuple[Sender, ExportStats]]:
    """Give a sender with retries that do not last, and its counts."""
    stats = ExportStats()
    sender = Sender(http(url, timeout_s), stats, retry=RetryPolicy(backoff_s))
    yield sender, stats
    sender.shutdown(soon())
