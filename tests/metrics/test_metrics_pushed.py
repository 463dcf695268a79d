"""The endpoint that metrics are pushed to: what is sent there, and what comes of one that does not answer."""

import socket
import time
from typing import Any

import pytest
from support.otlp_http_receiver import Receiver
from support.scraped_metrics import scrape

import torchotel


def test_headers_and_compression_are_those_of_metrics(server: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is for traces alone does not reach the endpoint of metrics."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "for-metrics=1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "for-traces=1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", "none")
    torchotel.instrument(endpoint=server.url.removesuffix("/v1/traces"), metrics_exporter="otlp").shutdown()
    headers = {name.lower(): text for name, text in server.pushed[-1].headers.items()}
    assert headers["for-metrics"] == "1"
    assert "for-traces" not in headers
    assert "content-encoding" not in headers


def test_a_dead_endpoint_keeps_nobody_waiting() -> None:
    """`flush` says that nothing came out in time, and the end comes in its time, with no thread left."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes a connection, and says nothing
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        handle = torchotel.instrument(endpoint=endpoint, metrics_exporter="otlp", traces_exporter="none")
        began_s = time.monotonic()
        assert not handle.flush(timeout_s=0.5)
        handle.shutdown(timeout_s=0.5)
        assert time.monotonic() - began_s < 5


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_an_endpoint_that_refuses_is_counted_and_told_once(protocol: str, caplog: pytest.LogCaptureFixture) -> None:
    """The warning names it once, the failures are counted, and the end waits for nobody."""
    with socket.create_server(("127.0.0.1", 0)) as refusing:
        port = refusing.getsockname()[1]
    settings: Any = {"endpoint": f"http://127.0.0.1:{port}", "protocol": protocol}
    handle = torchotel.instrument(metrics_exporter="prometheus,otlp", traces_exporter="none", **settings)
    for _ in range(3):
        assert not handle.flush(timeout_s=0.3)
    errors = handle.stats()["export_errors"]
    assert errors >= 1
    told = scrape(handle.prometheus_port).series
    (series,) = [labels for name, labels in told if name == "torchotel_export_errors_total"]
    assert dict(series)["error_type"] in {"ConnectionError", "UNAVAILABLE"}
    began_s = time.monotonic()
    handle.shutdown(timeout_s=60)
    assert time.monotonic() - began_s < 30
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"Could not send data points to {'http://' if protocol != 'grpc' else ''}127.0.0.1:{port}" in warning
    assert "OTEL_METRICS_EXPORTER=none" in warning
