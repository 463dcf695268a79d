"""What the tests of senders share."""

import threading
import time

from torchotel.exporters.otlp.transport import HttpTransport


def sender_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "torchotel-sender"]


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def http(url: str, timeout_s: float = 5.0, compression: str = "gzip") -> HttpTransport:
    return HttpTransport(
        url, headers={}, compression=compression, timeout_s=timeout_s, verify=True, cert=None, version="1.2"
    )
