"""The sender where nobody answers, or too late: it never makes anybody wait."""

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.misbehaving_servers import DRIP_S, DRIPS, drip, misbehaving
from support.otlp_http_receiver import Answer, Receiver
from support.otlp_tls_receivers import Authority
from support.senders import http, sender_threads, sending, soon

from torchotel.config.otlp_endpoint import OtlpEndpoint as OtlpReceiver
from torchotel.config.otlp_endpoint import without_credentials
from torchotel.exporters.base import ExportCounts, ExportStats
from torchotel.exporters.otlp.http import HttpTransport
from torchotel.exporters.otlp.sender import Sender
from torchotel.exporters.otlp.transport import Reply


@contextmanager
def black_hole() -> Iterator[str]:
    """Listen, take connections into the backlog, and never say a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/v1/traces"


def refusing() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return f"http://127.0.0.1:{port}/v1/traces"


@pytest.mark.parametrize("encrypted", [False, True], ids=["http", "https"])
def test_a_head_that_drips_does_not_hold_shutdown(encrypted: bool, tmp_path: Path) -> None:  # noqa: FBT001  # a parameter
    """Each byte restarts the timeout of `requests`; the thread stays in the attempt, and its spans are counted."""
    authority = Authority(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.server.configure_cert(context)
    dripping = threading.Event()

    def behave(connection: socket.socket, over: threading.Event) -> None:
        served = context.wrap_socket(connection, server_side=True) if encrypted else connection
        with served:
            dripping.set()
            drip(served, over)

    with misbehaving(behave) as port:
        endpoint = f"{'https' if encrypted else 'http'}://localhost:{port}/v1/traces"
        receiver = OtlpReceiver(endpoint, certificate=authority.files.authority, timeout_s=DRIPS * DRIP_S / 3)
        stats = ExportStats()
        sender = Sender(HttpTransport(receiver, version="1.2"), stats)
        sender.put(b"x", 5)
        assert dripping.wait(10)
        assert not sender.flush(soon(0.2))
        sender.shutdown(soon(0.3))
        assert sender_threads()  # still in the attempt
        assert stats.read() == ExportCounts(0, 5, {})
    for thread in sender_threads():
        thread.join(10)
    assert stats.read().dropped == 5


def test_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Where nobody listens flush keeps its deadline, shutdown does not wait, and the log has one line."""
    url = refusing()
    with sending(url, backoff_s=0.02) as (sender, stats):
        for _ in range(3):
            sender.put(b"x", 5)
        began_s = time.monotonic()
        assert not sender.flush(soon(0.3))
        assert time.monotonic() - began_s < 20  # the attempts go on for 64 seconds
        began_s = time.monotonic()
        sender.shutdown(soon(60))
        assert time.monotonic() - began_s < 30
    counts = stats.read()
    assert (counts.exported, counts.dropped) == (0, 15)
    assert counts.errors.keys() == {"ConnectionError"}
    (record,) = caplog.records
    assert url in record.getMessage()
    assert "Connection refused" in record.getMessage()
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in record.getMessage()


def test_shutdown_interrupts_a_pause(server: Receiver) -> None:
    """Shutdown cuts a pause of our own short, and tries a last time."""
    server.answers.append(Answer(503))
    with sending(server.url, backoff_s=30) as (sender, stats):
        sender.put(b"", 5)
        server.wait_for_requests(1)
        sender.shutdown(soon(10))
    assert stats.read() == ExportCounts(5, 0, {"503": 1})


def test_shutdown_does_not_wait_in_vain(server: Receiver) -> None:
    """A pause that an endpoint asks for beyond the deadline is not even begun."""
    server.answers += [Answer(503, {"Retry-After": "50"})] * 2
    with sending(server.url) as (sender, stats):
        sender.put(b"", 5)
        sender.put(b"", 5)
        server.wait_for_requests(1)
        began_s = time.monotonic()
        sender.shutdown(soon(45))
        assert time.monotonic() - began_s < 30
    assert stats.read().dropped == 10


def test_black_hole(caplog: pytest.LogCaptureFixture) -> None:
    """Where an endpoint never answers flush and shutdown keep their deadlines; spans are counted once, and logged."""
    with black_hole() as url, sending(url, timeout_s=4.0) as (sender, stats):
        sender.put(b"x", 5)
        sender.put(b"x", 4)
        assert not sender.flush(soon(0.2))
        sender.shutdown(soon(0.2))
        assert stats.read() == ExportCounts(0, 9, {})  # without an error: the attempt goes on
        (record,) = caplog.records
        assert "9 spans were not sent" in record.getMessage()
        assert url in record.getMessage()
        for thread in sender_threads():
            thread.join(5)
        assert stats.read() == ExportCounts(0, 9, {"ReadTimeout": 1})


def test_advises_on_a_server_that_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    """The message is not to start a Collector there: the port is taken."""
    with black_hole() as url, sending(url, timeout_s=0.1) as (sender, _):
        sender.put(b"x", 5)
        assert not sender.flush(soon())
    (message,) = caplog.messages
    assert "A server accepted the connection and did not answer" in message
    assert "Start a Collector" not in message


class Late(HttpTransport):
    """Comes to the server with its second attempt: the first is answered as by a busy server."""

    def __init__(self, url: str) -> None:
        super().__init__(OtlpReceiver(url, compression="none", timeout_s=30.0), version="1.2")
        self.tried = threading.Event()

    def send(self, body: bytes, timeout_s: float | None) -> Reply:
        if self.tried.is_set():
            return super().send(body, timeout_s)
        self.tried.set()
        return Reply(error_type="503", retry=True)


class Broken(Late):
    """Can't compress."""

    def pack(self, body: bytes) -> bytes:
        raise ValueError("no memory")


def test_an_error_of_our_own_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """However many requests fail by it; all are counted."""
    stats = ExportStats()
    sender = Sender(Broken("http://127.0.0.1:1"), stats)
    for _ in range(3):
        sender.put(b"x", 5)
    sender.shutdown(soon())
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert stats.read() == ExportCounts(0, 15, {"ValueError": 3})


def test_black_hole_in_shutdown() -> None:
    """An attempt that begins in shutdown ends before the deadline, and so does the thread."""
    with black_hole() as url:
        late, stats = Late(url), ExportStats()
        sender = Sender(late, stats)
        sender.put(b"x", 5)
        late.tried.wait()
        sender.shutdown(soon(1.0))
    assert not sender_threads()
    assert stats.read() == ExportCounts(0, 5, {"503": 1, "ReadTimeout": 1})


def test_at_interpreter_end(server: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no thread can be started any more, shutdown sends by itself."""
    stats = ExportStats()
    sender = Sender(http(server.url), stats)
    with monkeypatch.context() as patch, suppress(RuntimeError):
        patch.setattr(threading.Thread, "start", _refuse)
        sender.put(b"", 3)
    assert not sender.flush(soon())
    sender.shutdown(soon())
    assert stats.read() == ExportCounts(3, 0, {})


def _refuse(thread: threading.Thread) -> None:
    msg = "can't create new thread at interpreter shutdown"
    raise RuntimeError(msg)


def test_url_without_credentials() -> None:
    """No log line shows a password or a key."""
    assert without_credentials("https://me:pass@host:4318/v1/traces?key=1") == "https://host:4318/v1/traces"
