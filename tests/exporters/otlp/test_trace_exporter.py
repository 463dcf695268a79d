"""Traces leave in requests of bounded size, at the URL as it was given."""

import logging
import subprocess
import sys
from typing import Any

import pytest
import requests
from support.misbehaving_servers import closed_port
from support.otlp_http_receiver import Answer, Receiver, receiver
from support.otlp_traces import RESOURCE, T0, flat, proto, rich
from support.senders import http, soon

from torchotel._limits import MAX_WAITING_REQUESTS
from torchotel._utils.gil import SLICE_ITEMS, GilYielder
from torchotel.config.otlp_endpoint import OtlpCompression
from torchotel.exporters.base import ExportCounts
from torchotel.exporters.otlp import trace_exporter
from torchotel.exporters.otlp.encoder import Envelope, SpanEncoder
from torchotel.exporters.otlp.trace_exporter import SPANS_PER_ITEM, Batch, RequestExporter
from torchotel.tracing.span import Span, SpanTemplate, Trace


@pytest.mark.parametrize("compression", ["gzip", "none"])
def test_delivers(server: Receiver, compression: OtlpCompression) -> None:
    """Spans arrive as they were, at the URL as it was given, under our name and the user's headers."""
    transport = http(server.url, compression=compression, headers={"Authorization": "Bearer x"})
    exporter = RequestExporter(transport, resource=RESOURCE, version="1.2")
    exporter.export(flat(100))
    exporter.export(rich())
    exporter.push()
    assert exporter.flush(soon())
    exporter.shutdown(soon())
    (request,) = server.requests
    sent = [span for trace in (flat(100), rich()) for span in proto(trace)]
    assert sorted(span.span_id for span in server.spans) == sorted(span.span_id for span in sent)
    assert request.path == "/v1/traces"
    assert request.headers["Content-Type"] == "application/x-protobuf"
    assert request.headers["User-Agent"] == "torchotel/1.2"
    assert request.headers["Authorization"] == "Bearer x"
    assert request.headers.get("Content-Encoding") == ("gzip" if compression == "gzip" else None)
    assert exporter.stats.read() == ExportCounts(104, 0, {})


def test_splits_and_batches(server: Receiver) -> None:
    """Small traces share a request, a large one is spread over several."""
    exporter = RequestExporter(
        http(server.url), resource=RESOURCE, version="1.2", max_request_spans=300, max_request_bytes=90_000
    )
    for number in range(4):
        exporter.export(flat(64, number))
    exporter.export(flat(1000, 9))
    exporter.shutdown(soon())
    sizes = [len(request.spans()) for request in server.requests]
    assert sum(sizes) == 1256
    assert max(sizes) <= 300
    assert len(sizes) < 8
    assert max(request.message.ByteSize() for request in server.requests) < 91_000
    assert exporter.stats.read() == ExportCounts(1256, 0, {})


def test_spans_of_a_template_are_side_by_side(server: Receiver) -> None:
    """In a request of several traces, so that compression finds the one in the other."""
    exporter = RequestExporter(http(server.url), resource=RESOURCE, version="1.2")
    templates = [SpanTemplate(f"forward {name}", {}) for name in "abc"]
    for number in range(4):
        spans = [Span(template, 1 + index, 0, T0, T0 + 9) for index, template in enumerate(templates)]
        exporter.export(Trace(1 + number, spans, {}))
    exporter.shutdown(soon())
    (request,) = server.requests
    found = [(span.name, int.from_bytes(span.trace_id, "big")) for span in request.spans()]
    assert found == [(template.name, 1 + number) for template in templates for number in range(4)]


def test_rests_while_the_spans_of_a_request_are_joined() -> None:
    """They have megabytes, and the training thread needs the GIL."""
    batch, rests, number_of_spans = Batch(), list[int](), SPANS_PER_ITEM * SLICE_ITEMS
    templates = [SpanTemplate(name, {}) for name in "ab"]
    for number in range(number_of_spans):
        batch.add([(template, b"%s%d" % (template.name.encode(), number)) for template in templates], 2)
    pieces = batch.pieces(GilYielder(lambda: rests.append(1)))
    assert pieces == [b"".join(b"%s%d" % (name, number) for number in range(number_of_spans)) for name in (b"a", b"b")]
    assert len(rests) == 2


def test_what_a_balancer_has_set_comes_back_to_it(server: Receiver) -> None:
    """Requests share all that can be looked up once, but not a cookie that came later, or a newer one."""
    server.answers += [Answer(200, {"Set-Cookie": f"route={name}; Path=/"}) for name in "ab"]
    transport = http(server.url, compression="none", headers={"Authorization": "Bearer x"})
    body = SpanEncoder().encode(flat(1))
    for one in (b"", Envelope(RESOURCE, "1").wrap([body]), b""):
        assert transport.send(one, 10).error_type is None
    transport.close()
    seen = [(one.headers.get("Cookie"), len(one.spans())) for one in server.requests]
    assert seen == [(None, 0), ("route=a", 1), ("route=b", 0)]
    assert {one.headers["Authorization"] for one in server.requests} == {"Bearer x"}


def test_what_others_write_into_a_request_is_in_no_other(server: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instrumentations put their headers in by a wrapper of `Session.send`."""
    send, names = requests.Session.send, iter("ab")

    def wrapped(session: requests.Session, request: requests.PreparedRequest, **settings: Any) -> requests.Response:
        request.headers[f"x-{next(names)}"] = "1"
        return send(session, request, **settings)

    monkeypatch.setattr(requests.Session, "send", wrapped)
    transport = http(server.url, compression="none")
    for _ in range(2):
        transport.send(b"", 10)
    transport.close()
    assert [[name for name in one.headers if name.startswith("x-")] for one in server.requests] == [["x-a"], ["x-b"]]


def test_no_proxy_sees_what_goes_to_this_machine(server: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would get the headers, with their credentials; for other hosts it is used."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with receiver() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1/traces"))
        port = server.url.rpartition(":")[2]
        for host in ("127.0.0.1", "localhost", "receiver.invalid"):
            sending = http(f"http://{host}:{port}", headers={"Authorization": "Bearer x"})
            assert sending.send(b"", 10).error_type is None
            sending.close()
    assert (len(server.requests), len(proxy.requests)) == (2, 1)


def test_what_can_be_no_request_leaves_nothing_behind() -> None:
    """The filter keeps a key in the address out of the log, as long as there is a connection."""
    logger = logging.getLogger("urllib3.connectionpool")
    before = list(logger.filters)
    transport = http("http://127.0.0.1:1/v1/traces?key=secret", headers={"a": "b\nc"})
    assert transport.send(b"", 10).error_type == "InvalidHeader"
    transport.close()
    assert logger.filters == before


def test_unwritable_trace_is_counted(server: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    """A trace that cannot be encoded costs its own spans and one log line."""
    exporter = RequestExporter(http(server.url), resource=RESOURCE, version="1.2")
    bad = flat(100)
    bad = Trace(bad.trace_id, [*bad.spans[:70], bad.spans[70]._replace(start_ns=-1)], {})
    exporter.export(bad)
    exporter.export(bad)
    assert not exporter.flush(soon())
    assert exporter.flush(soon())  # nothing was lost since the last one
    exporter.shutdown(soon())
    assert exporter.stats.read() == ExportCounts(128, 14, {"error": 2})
    assert len(caplog.records) == 1


@pytest.mark.program
def test_import_is_cheap() -> None:
    """Importing the exporter brings in neither requests nor protobuf."""
    code = (
        "import sys, torchotel.exporters.otlp.trace_exporter, torchotel.exporters.otlp.sender\n"
        "assert not {'requests', 'urllib3', 'google.protobuf', 'grpc', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)  # our own words


def test_requests_grow_while_the_endpoint_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of a second would fill the queue in a minute, with a hundredth of the bytes that may wait."""
    monkeypatch.setattr(trace_exporter, "MAX_AGE_S", 0.0)
    exporter = RequestExporter(http(f"http://127.0.0.1:{closed_port()}"), resource=RESOURCE, version="1.2")
    for number in range(5 * MAX_WAITING_REQUESTS):
        exporter.export(flat(10, number))
        exporter.push_due()
    assert exporter.stats.read().dropped == 0
    exporter.shutdown(soon(0.1))
    assert exporter.stats.read().dropped == 50 * MAX_WAITING_REQUESTS
