"""What the sender makes of answers: it delivers what can be delivered, and counts the rest."""

import logging
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from google.rpc.status_pb2 import Status
from support.misbehaving_servers import misbehaving, trickle
from support.otlp_grpc_receiver import grpc_receiver
from support.otlp_http_receiver import Answer, Receiver, rejected
from support.senders import http, sending, soon

from torchotel.exporters.base import ExportCounts, ExportStats
from torchotel.exporters.otlp.http import retry_after_s
from torchotel.exporters.otlp.sender import RetryPolicy, Sender


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_retries(server: Receiver, status: int, caplog: pytest.LogCaptureFixture) -> None:
    """What may pass is tried again; the log says once that it began and once that it is over."""
    caplog.set_level(logging.INFO, "torchotel")
    server.answers += [Answer(status), Answer(status)]
    with sending(server.url) as (sender, stats):
        sender.put(b"", 7)
        assert sender.flush(soon())
        sender.put(b"", 3)
    assert stats.read() == ExportCounts(10, 0, {str(status): 2})
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert server.url in caplog.text
    assert f"answered {status}" in caplog.text


def test_retry_after(server: Receiver) -> None:
    """An endpoint that asks for a pause gets it."""
    server.answers.append(Answer(503, {"Retry-After": "1"}))
    with sending(server.url) as (sender, _):
        sender.put(b"", 1)
        first, second = server.wait_for_requests(2)
    assert second.time_s - first.time_s >= 1.0


def test_a_pause_holds_for_the_next_request(server: Receiver) -> None:
    """A request that would have to wait too long is dropped; no other is sent before the endpoint wants one."""
    server.answers.append(Answer(503, {"Retry-After": "1"}))
    stats = ExportStats()
    sender = Sender(http(server.url), stats, retry=RetryPolicy(0.01, max_elapsed_s=0.9))
    while not stats.read().exported:
        sender.put(b"", 1)
        sender.flush(soon())
    sender.shutdown(soon())
    first, second = server.requests
    assert second.time_s - first.time_s >= 1.0
    counts = stats.read()
    assert counts == ExportCounts(1, counts.dropped, {"503": 1, "throttled": counts.dropped - 1})


@pytest.mark.parametrize("limit_s", [64.0, 30.0])
def test_a_pause_that_drops_requests_is_told(
    server: Receiver, limit_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names the pause and the time for which this sender keeps a request."""
    server.answers.append(Answer(429, {"Retry-After": "120"}))
    stats = ExportStats()
    sender = Sender(http(server.url), stats, retry=RetryPolicy(max_elapsed_s=limit_s))
    for _ in range(2):
        sender.put(b"", 1)
        assert not sender.flush(soon())
    sender.shutdown(soon())
    assert stats.read() == ExportCounts(0, 2, {"429": 1, "throttled": 1})
    (warning,) = [record.getMessage() for record in caplog.records]
    kept = f"A request is kept for {limit_s:g} seconds, so spans are dropped meanwhile."
    assert warning.endswith(f"It asks for a pause of 120 seconds. {kept}")


@pytest.mark.parametrize("status", [301, 400, 404, 413])
def test_a_pause_with_an_answer_that_is_final_holds_nothing_up(server: Receiver, status: int) -> None:
    """The sender does not send the refused request again, and sends the next request at once."""
    server.answers.append(Answer(status, {"Retry-After": "3600"}))
    with sending(server.url) as (sender, stats):
        sender.put(b"", 7)
        assert not sender.flush(soon())
        sender.put(b"", 2)
        assert sender.flush(soon())
    assert stats.read() == ExportCounts(2, 7, {str(status): 1})


@pytest.mark.parametrize("asked", ["0", "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_no_pause_asked_for_is_a_pause_of_our_own(server: Receiver, asked: str) -> None:
    """An endpoint that says to come back at once is not called without a pause."""
    server.always = Answer(503, {"Retry-After": asked})
    stats = ExportStats()
    sender = Sender(http(server.url), stats, retry=RetryPolicy(0.1, 0.8))
    sender.put(b"", 1)
    assert not sender.flush(soon())
    sender.shutdown(soon())
    assert 2 <= len(server.requests) <= 5  # after 0.1, 0.2 and 0.4 s, a quarter more or less, and at the end


def test_retry_after_reads_dates() -> None:
    """Seconds or a date, never longer than an hour; what is neither says nothing."""
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=20), usegmt=True)
    assert 18 < (retry_after_s(later) or 0) <= 20
    past = "Wed, 21 Oct 2015 07:28:00 GMT"
    given = (None, "3", " 0 ", "120", "86400", past, "soon", "-1", "nan", "1e9", "Wed, 99 Oct 2015 07:28:00 GMT", "")
    assert [retry_after_s(text) for text in given] == [None, 3.0, 0.0, 120.0, 3600.0, 0.0, *[None] * 6]


def test_a_date_in_no_time_zone_that_there_is_says_nothing() -> None:
    """It is one of the things that an endpoint may write there, and no reason to fail."""
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 +999999999999999") is None


@pytest.mark.parametrize("status", [301, 307, 400, 401, 404, 413, 500])
def test_other_statuses_drop(server: Receiver, status: int, caplog: pytest.LogCaptureFixture) -> None:
    """What no repetition betters is dropped at once; a redirect is not followed."""
    server.answers.append(Answer(status, {"Location": server.url}))
    with sending(server.url) as (sender, stats):
        sender.put(b"", 7)
        assert not sender.flush(soon())
        sender.put(b"", 2)
        assert sender.flush(soon())
    assert len(server.requests) == 2
    assert stats.read() == ExportCounts(2, 7, {str(status): 1})
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/x-protobuf", Status(code=3, message="tenant\nunknown").SerializeToString()),
        ("application/json", b'{"code": 3, "message": "tenant\\nunknown"}'),
        ("text/plain", b"tenant unknown\n"),
    ],
)
def test_a_refusal_quotes_the_message_of_the_server(
    kind: str, body: bytes, server: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """Its advice is not to start a Collector: something answered."""
    server.answers.append(Answer(400, {"Content-Type": kind}, body))
    with sending(server.url) as (sender, _):
        sender.put(b"", 7)
        assert not sender.flush(soon())
    (message,) = caplog.messages
    assert "it answered 400 Bad Request: tenant unknown. " in message
    assert "Start a Collector" not in message
    assert "OTEL_EXPORTER_OTLP_HEADERS" in message


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/html", b"<html>no</html>"),
        ("application/x-protobuf", b"\xff<"),
        ("application/json", b"["),
        ("application/json", b'{"message": "' + b"x" * 5000 + b'"}'),
        ("text/plain", b"\x1b[31m\xff"),
    ],
)
def test_a_refusal_is_one_printable_line_of_bounded_length(
    kind: str, body: bytes, server: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    server.answers.append(Answer(400, {"Content-Type": kind}, body))
    with sending(server.url) as (sender, stats):
        sender.put(b"", 7)
        assert not sender.flush(soon())
    (message,) = caplog.messages
    assert message.isprintable()
    assert len(message) < 600
    assert stats.read() == ExportCounts(0, 7, {"400": 1})


def test_partial_success(server: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    """Spans that an endpoint rejects count as dropped, with its reason in the log."""
    server.answers += [
        rejected(3, "too old"),
        rejected(99, "more than there were"),
        Answer(200, {}, b"<html>"),
    ]
    with sending(server.url) as (sender, stats):
        for _ in range(3):
            sender.put(b"", 10)
        assert not sender.flush(soon())
    assert stats.read() == ExportCounts(17, 13, {"rejected": 2})
    assert "rejected 3 spans: too old" in caplog.text
    assert "more than there were" not in caplog.text


def test_a_page_is_no_receiver(server: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    """A web server that says 200 to anything takes no spans, whatever it says."""
    server.answers.append(Answer(200, {"Content-Type": "text/html; charset=utf-8"}, b"<html>Jaeger UI</html>"))
    with sending(server.url) as (sender, stats):
        sender.put(b"", 7)
        assert not sender.flush(soon())
    assert stats.read() == ExportCounts(0, 7, {"no_otlp": 1})
    (record,) = caplog.records
    assert "it answered 200 with text/html, so it is no OTLP receiver" in record.getMessage()


def test_a_port_of_grpc(caplog: pytest.LogCaptureFixture) -> None:
    """The warning says what is spoken there instead."""
    with grpc_receiver() as receiver, sending(f"http://127.0.0.1:{receiver.port}/v1/traces") as (sender, _):
        sender.put(b"", 7)
        assert not sender.flush(soon(0.5))
    assert "gRPC may be spoken there: set OTEL_EXPORTER_OTLP_PROTOCOL=grpc" in caplog.text


def test_a_warning_of_an_endpoint_is_told(server: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    """What it says of a request that it took whole is told once, and nothing counts as lost."""
    server.answers += [rejected(0, "use HTTPS"), rejected(0, "use HTTPS")]
    with sending(server.url) as (sender, stats):
        sender.put(b"", 10)
        sender.put(b"", 10)
        assert sender.flush(soon())
    assert stats.read() == ExportCounts(20, 0, {})
    (record,) = caplog.records
    assert record.getMessage() == f"{server.url} accepted the spans with a warning: use HTTPS"


def test_gives_up(server: Receiver) -> None:
    """A request that fails for too long makes room for the next."""
    server.answers += [Answer(503)] * 5
    stats = ExportStats()
    sender = Sender(http(server.url), stats, retry=RetryPolicy(0.05, 0.1))
    sender.put(b"", 7)
    assert not sender.flush(soon())
    sender.shutdown(soon())
    assert stats.read().dropped == 7


@pytest.mark.parametrize(("status", "error_type"), [(b"200 OK", None), (b"503 Busy", "503"), (b"400 No", "400")])
def test_a_status_is_enough(status: bytes, error_type: str | None) -> None:
    """The rest of an answer is not awaited longer than the timeout, and what it is about is known without it."""
    with misbehaving(trickle(status)) as port:
        way, began_s = http(f"http://127.0.0.1:{port}/v1/traces", timeout_s=0.5), time.monotonic()
        reply = way.send(b"", None)
        assert time.monotonic() - began_s < 60  # the last byte would come after fifty minutes
        way.close()
    assert reply.error_type == error_type
