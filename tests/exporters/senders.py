"""What the tests of senders share."""

import threading
import time
from collections.abc import Mapping

from torchotel._receiver import OtlpCompression, Receiver
from torchotel.exporters.otlp.http_transport import HttpTransport


def sender_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "torchotel-sender"]


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def http(
    url: str, timeout_s: float = 5.0, compression: OtlpCompression = "gzip", headers: Mapping[str, str] | None = None
) -> HttpTransport:
    receiver = Receiver(url, headers=headers or {}, compression=compression, timeout_s=timeout_s)
    return HttpTransport(receiver, version="1.2")
