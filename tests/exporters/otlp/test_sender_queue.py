"""What waits is bounded, and every span is counted once."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import context
from support.senders import sender_threads, soon

from torchotel.exporters.base import ExportCounts, ExportStats
from torchotel.exporters.otlp.sender import Sender
from torchotel.exporters.otlp.transport import Reply


class Held:
    """A way to nowhere that opens when it is told to."""

    endpoint = "held"

    def __init__(self) -> None:
        self.began = threading.Event()
        self.opened = threading.Event()
        self.sent: list[bytes] = []
        self.context: object = None

    def pack(self, body: bytes) -> bytes:
        return body

    def send(self, body: bytes, timeout_s: float | None) -> Reply:
        self.began.set()
        self.opened.wait()
        self.sent.append(body)
        self.context = context.get_current()
        return Reply()

    def close(self) -> None:
        pass


def queued(**limits: Any) -> tuple[Sender, Held, ExportStats]:
    held, stats = Held(), ExportStats()
    sender = Sender(held, stats, **limits)
    sender.put(b"0", 1)
    held.began.wait()
    return sender, held, stats


@pytest.mark.parametrize(
    "make", [lambda: queued(max_requests=2), lambda: queued(max_bytes=3)], ids=["requests", "bytes"]
)
def test_queue_is_bounded(
    make: Callable[[], tuple[Sender, Held, ExportStats]], caplog: pytest.LogCaptureFixture
) -> None:
    """A full queue drops the oldest request, counts its spans, and logs one warning."""
    sender, held, stats = make()
    for body in (b"1a", b"2b", b"3"):
        sender.put(body, 10)
    assert stats.read().dropped == 10
    (warning,) = caplog.messages
    assert "does not accept spans as fast as they are produced" in warning
    held.opened.set()
    sender.shutdown(soon())
    assert held.sent == [b"0", b"2b", b"3"]
    assert stats.read() == ExportCounts(21, 10, {"queue_full": 1}, dropped_queue=10)


def test_counts_once() -> None:
    """Spans that shutdown gave up are not counted again when an answer comes; later ones are dropped."""
    sender, held, stats = queued()
    sender.put(b"1", 2)
    sender.shutdown(soon(0))
    sender.put(b"2", 4)
    assert stats.read() == ExportCounts(0, 7, {})
    held.opened.set()
    for thread in sender_threads():
        thread.join(5)
    assert stats.read() == ExportCounts(0, 7, {})
    assert held.sent == [b"0"]


def test_suppresses_instrumentation() -> None:
    """The thread asks instrumentations of HTTP clients to look away."""
    sender, held, _ = queued()
    held.opened.set()
    sender.shutdown(soon())
    assert isinstance(held.context, dict)
    assert sorted(key.rsplit("-", 5)[0] for key in held.context) == [
        "suppress_http_instrumentation",
        "suppress_instrumentation",
    ]


def test_survives_its_transport() -> None:
    """A fault of our own costs one request, not the thread."""

    class Broken(Held):
        def pack(self, body: bytes) -> bytes:
            if body == b"bad":
                raise MemoryError
            return body

    held, stats = Broken(), ExportStats()
    held.opened.set()
    sender = Sender(held, stats)
    sender.put(b"bad", 1)
    sender.put(b"good", 2)
    sender.shutdown(soon())
    assert stats.read() == ExportCounts(2, 1, {"MemoryError": 1})


def test_starts_nothing_unused() -> None:
    """A sender without requests has no thread, is flushed, and ends."""
    sender = Sender(Held(), ExportStats())
    assert sender.flush(soon(0))
    assert not sender_threads()
    sender.shutdown(soon(0))
