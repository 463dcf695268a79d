"""Over gRPC the same bytes arrive, and the same sender repeats, drops and counts."""

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from support.otlp_grpc_receiver import GrpcReceiver, Refusal, grpc_receiver
from support.otlp_traces import RESOURCE, flat, proto, request, rich
from support.senders import sender_threads, soon

from torchotel.config.otlp_endpoint import OtlpCompression, OtlpEndpoint
from torchotel.exporters.base import ExportCounts, ExportStats
from torchotel.exporters.otlp.grpc import GrpcTransport, Target, _failure, metadata, read_target
from torchotel.exporters.otlp.sender import RetryPolicy, Sender
from torchotel.exporters.otlp.trace_exporter import RequestExporter
from torchotel.exporters.otlp.transport import METRICS, TRACES

GRPC_LIMIT_BYTES = 4 * 1024 * 1024
PASSING = ("CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS")
"""https://opentelemetry.io/docs/specs/otlp/#otlpgrpc-response"""


@pytest.fixture
def peer() -> Iterator[GrpcReceiver]:
    with grpc_receiver() as running:
        yield running


def test_no_proxy_sees_what_goes_to_this_machine(peer: GrpcReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would get the headers, with their credentials."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        sending = transport(f"http://127.0.0.1:{peer.port}")
        assert sending.send(b"", 10).error_type is None
        sending.close()


def transport(endpoint: str, timeout_s: float = 5.0, compression: OtlpCompression = "gzip") -> GrpcTransport:
    receiver = OtlpEndpoint(endpoint, "grpc", {"Authorization": "Bearer x"}, compression, timeout_s)
    return GrpcTransport(receiver, TRACES, version="1.2")


@contextmanager
def sending(endpoint: str, timeout_s: float = 5.0) -> Iterator[tuple[Sender, ExportStats]]:
    stats = ExportStats()
    sender = Sender(transport(endpoint, timeout_s), stats, retry=RetryPolicy(0.01))
    yield sender, stats
    sender.shutdown(soon())


def partial(rejected: int, reason: str) -> ExportTraceServiceResponse:
    response = ExportTraceServiceResponse()
    response.partial_success.rejected_spans, response.partial_success.error_message = rejected, reason
    return response


@pytest.mark.parametrize("compression", ["gzip", "none"])
def test_delivers(peer: GrpcReceiver, compression: OtlpCompression) -> None:
    """The request arrives as it was encoded, under our name and the user's headers, whose names are lower-case."""
    exporter = RequestExporter(transport(peer.endpoint, compression=compression), resource=RESOURCE, version="1.2")
    exporter.export(rich())
    exporter.push()
    assert exporter.flush(soon())
    exporter.shutdown(soon())
    (call,) = peer.calls
    spans = call.message.resource_spans[0].scope_spans[0].spans
    assert [span.span_id for span in spans] == [span.span_id for span in proto(rich())]
    assert call.message.resource_spans[0].resource == request([]).resource_spans[0].resource
    assert call.metadata["authorization"] == "Bearer x"
    assert str(call.metadata["user-agent"]).startswith("torchotel/1.2 grpc-python/")
    assert exporter.stats.read() == ExportCounts(4, 0, {})
    assert not sender_threads()


def test_stays_below_the_limit_of_a_message(peer: GrpcReceiver) -> None:
    """A trace of many times 4 MiB, what a gRPC server takes by default, arrives whole."""
    exporter = RequestExporter(transport(peer.endpoint), resource=RESOURCE, version="1.2")
    exporter.export(flat(40_000))
    exporter.shutdown(soon(60))
    assert exporter.stats.read() == ExportCounts(40_000, 0, {})
    sizes = [call.message.ByteSize() for call in peer.calls]
    assert sum(sizes) > 2 * GRPC_LIMIT_BYTES
    assert max(sizes) < GRPC_LIMIT_BYTES


@pytest.mark.parametrize("code", PASSING)
def test_retries(peer: GrpcReceiver, code: str, caplog: pytest.LogCaptureFixture) -> None:
    """What may pass is tried again; the log says once that it began and once that it is over."""
    caplog.set_level(logging.INFO, "torchotel")
    peer.answers += [Refusal(grpc.StatusCode[code])] * 2
    with sending(peer.endpoint) as (sender, stats):
        sender.put(b"", 7)
        assert sender.flush(soon())
    assert stats.read() == ExportCounts(7, 0, {code: 2})
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert f"localhost:{peer.port}: {code}: later" in caplog.text


@pytest.mark.parametrize("code", [code.name for code in grpc.StatusCode if code.name not in {*PASSING, "OK"}])
def test_other_codes_drop(peer: GrpcReceiver, code: str, caplog: pytest.LogCaptureFixture) -> None:
    """What no repetition betters is dropped at once; an exhausted resource without RetryInfo is such a thing."""
    peer.answers.append(Refusal(grpc.StatusCode[code]))
    with sending(peer.endpoint) as (sender, stats):
        sender.put(b"", 7)
        assert not sender.flush(soon())
        sender.put(b"", 2)
        assert sender.flush(soon())
    assert len(peer.calls) == 2
    assert stats.read() == ExportCounts(2, 7, {code: 1})
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


@pytest.mark.parametrize("code", ["RESOURCE_EXHAUSTED", "UNAVAILABLE"])
def test_retry_info(peer: GrpcReceiver, code: str, caplog: pytest.LogCaptureFixture) -> None:
    """An endpoint that asks for a pause gets it, and its exhausted resource is tried again."""
    peer.answers.append(Refusal(grpc.StatusCode[code], retry_after_s=0.5))
    with sending(peer.endpoint) as (sender, stats):
        began_s = time.monotonic()
        sender.put(b"", 1)
        peer.wait_for_calls(2)
        assert time.monotonic() - began_s >= 0.5
    assert stats.read() == ExportCounts(1, 0, {code: 1})
    assert "The request is sent again for up to 64 seconds." in caplog.text


def test_retry_info_with_a_status_that_is_final_holds_nothing_up(peer: GrpcReceiver) -> None:
    peer.answers.append(Refusal(grpc.StatusCode.INVALID_ARGUMENT, retry_after_s=3600))
    with sending(peer.endpoint) as (sender, stats):
        sender.put(b"", 7)
        assert not sender.flush(soon())
        sender.put(b"", 2)
        assert sender.flush(soon())
    assert stats.read() == ExportCounts(2, 7, {"INVALID_ARGUMENT": 1})


def test_partial_success(peer: GrpcReceiver, caplog: pytest.LogCaptureFixture) -> None:
    """Spans that an endpoint rejects count as dropped, with its reason in the log."""
    peer.answers += [partial(3, "too old"), partial(0, "")]
    with sending(peer.endpoint) as (sender, stats):
        sender.put(b"", 10)
        sender.put(b"", 10)
        assert not sender.flush(soon())
    assert stats.read() == ExportCounts(17, 3, {"rejected": 1})
    assert "rejected 3 spans: too old" in caplog.text


def test_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Where nobody listens flush keeps its deadline, shutdown does not wait, and the log has one line."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with sending(f"http://127.0.0.1:{port}") as (sender, stats):
        sender.put(b"", 5)
        sender.put(b"", 5)
        began_s = time.monotonic()
        assert not sender.flush(soon(0.3))
        sender.shutdown(soon(60))
        assert time.monotonic() - began_s < 30
    assert stats.read().dropped == 10
    assert stats.read().errors.keys() == {"UNAVAILABLE"}
    (record,) = caplog.records
    assert f"127.0.0.1:{port}" in record.getMessage()
    assert "Connection refused" in record.getMessage()


def test_black_hole() -> None:
    """Where an endpoint never answers shutdown keeps its limit, for the timeout is a deadline for the whole call."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        sending(f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=60) as (sender, stats),
    ):
        sender.put(b"", 5)
        began_s = time.monotonic()
        sender.shutdown(soon(0.5))
        assert time.monotonic() - began_s < 30
    assert stats.read().dropped == 5


def test_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    """A receiver that dies and starts again on the same port gets what waited, without a restart of the program."""
    caplog.set_level(logging.INFO, "torchotel")
    with grpc_receiver() as first, sending(first.endpoint) as (sender, stats):
        sender.put(b"", 1)
        assert sender.flush(soon())
        first.stop()
        sender.put(b"", 2)
        assert not sender.flush(soon(0.3))
        with grpc_receiver(f"127.0.0.1:{first.port}") as second:
            assert sender.flush(soon())
            assert len(second.calls) == 1
    assert (stats.read().exported, stats.read().dropped) == (3, 0)
    assert "Spans reach" in caplog.text


def test_an_http_port_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Where HTTP is spoken the log says which port is for what."""
    from support.otlp_http_receiver import receiver  # noqa: PLC0415  # the only test here that speaks HTTP

    with receiver() as http, sending(f"http://127.0.0.1:{http.server_port}", timeout_s=1) as (sender, _):
        sender.put(b"", 1)
        assert not sender.flush(soon(2))
    assert "4317 for grpc" in caplog.text


def test_reads_targets() -> None:
    """A scheme says whether there is TLS; without one `insecure` does; path and credentials are no part of a target."""
    given = ("http://h:1", "https://h:1/v1/traces", "http://u:p@h:1", "https://h", "http://[::1]:1", "h:1", "unix:/s")
    assert [read_target(endpoint, insecure=False) for endpoint in given] == [
        Target("h:1", secure=False),
        Target("h:1", secure=True),
        Target("h:1", secure=False),
        Target("h:443", secure=True),
        Target("[::1]:1", secure=False),
        Target("h:1", secure=True),
        Target("unix:/s", secure=True),
    ]
    assert read_target("h:1", insecure=True) == Target("h:1", secure=False)
    assert read_target("https://h:1", insecure=True).secure


def test_leaves_out_what_grpc_cannot_carry(caplog: pytest.LogCaptureFixture) -> None:
    """Names are lower-case; a header that gRPC would fail on is left out, and its text is not told."""
    headers = {"X-Key": "v", "raw-bin": "secret", "User-Agent": "theirs", "grpc-timeout": "1S"}
    assert list(metadata(headers)) == [("x-key", "v")]
    assert len(caplog.records) == 1
    assert "secret" not in caplog.text


def test_metrics_have_a_service_of_their_own(peer: GrpcReceiver) -> None:
    """Data points reach the service of metrics."""
    way = GrpcTransport(OtlpEndpoint(peer.endpoint, "grpc"), METRICS, version="1.2")
    sender = Sender(way, ExportStats(), signal=METRICS)
    sender.put(b"", 0)
    sender.shutdown(soon())
    assert (len(peer.pushed), len(peer.calls)) == (1, 0)


def test_a_fork_disturbs_neither_side(peer: GrpcReceiver) -> None:
    """A child that is forked while a channel is open ends as it should, and the parent goes on sending."""
    with sending(peer.endpoint) as (sender, stats):
        for number in range(3):
            sender.put(b"", 1)
            assert sender.flush(soon())
            child = os.fork()
            if not child:
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            assert len(peer.calls) == number + 1
    assert stats.read() == ExportCounts(3, 0, {})


def test_shutdown_tries_again_where_a_server_says_that_it_is_unavailable(peer: GrpcReceiver) -> None:
    """A Collector that is short of memory, or ends, answers so; its word is no sign that nobody is there."""
    peer.answers += [Refusal(grpc.StatusCode.UNAVAILABLE)] * 2
    with sending(peer.endpoint) as (sender, stats):
        peer.may_answer.clear()
        sender.put(b"", 10)
        ending = threading.Thread(target=sender.shutdown, args=(soon(),))
        ending.start()
        with sender._changed:
            sender._changed.wait_for(lambda: sender._deadline_s is not None)
        peer.may_answer.set()
        ending.join()
    assert stats.read() == ExportCounts(10, 0, {"UNAVAILABLE": 2})


def test_tells_an_answer_from_none(peer: GrpcReceiver) -> None:
    """What a server says is an answer, whatever its status; what gRPC says where nobody is there is none."""
    way = transport(peer.endpoint)
    peer.answers.append(Refusal(grpc.StatusCode.UNAVAILABLE))
    assert way.send(b"", 5.0).answered
    peer.stop()
    assert not way.send(b"", 5.0).answered
    way.close()


def test_a_channel_that_is_idle_again_makes_no_answer_of_a_failure(peer: GrpcReceiver) -> None:
    """The pause of a channel that could not connect may be over before it is asked for its state."""
    way = transport(peer.endpoint)
    peer.stop()
    address = peer.endpoint.removeprefix("http://")
    with grpc.insecure_channel(address) as failing:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = failing.unary_unary(TRACES.method)
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", timeout=5)
    with grpc.insecure_channel(address) as idle:
        assert not _failure(caught.value, way._otlp_endpoint, idle).answered
