"""A client gets what its headers ask for."""

import gzip
from http.client import HTTPConnection

import pytest

import torchotel

PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
WITH_PROTOBUF = (
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.7," + PROMETHEUS_3
)


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        (PROMETHEUS_2, True),
        (PROMETHEUS_3, True),
        (WITH_PROTOBUF, True),
        ("application/openmetrics-text", True),
        ("text/plain;version=0.0.4, application/openmetrics-text", True),
        ("text/plain;version=1.0.0", False),
        ("*/*", False),
        ("image/png", False),
        ("", False),
    ],
)
def test_the_format_is_that_of_prometheus_client(accept: str, openmetrics: bool) -> None:  # noqa: FBT001  # a parameter of the test
    """Quality values are not compared: OpenMetrics is served to every client that names it."""
    kind, _, body = answer({"Accept": accept})
    assert kind.startswith(
        "application/openmetrics-text; version=1.0.0" if openmetrics else "text/plain; version=0.0.4"
    )
    assert body.endswith(b"# EOF\n") == openmetrics


@pytest.mark.parametrize("version", ["x", "1.", '"1.0.0"', "\u00b2", "1" * 5000])
def test_a_malformed_version_is_answered(version: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Which of the two formats it gets depends on the release of prometheus_client."""
    _, _, body = answer({"Accept": f"application/openmetrics-text;version={version}"})
    assert b"torch_steps_total 0.0" in body
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("accept", "compressed"),
    [
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("identity", False),
        ("not-gzip", False),
        ("", False),
    ],
)
def test_a_body_is_compressed_if_gzip_is_named(accept: str, compressed: bool) -> None:  # noqa: FBT001  # a parameter of the test
    _, encoding, body = answer({"Accept-Encoding": accept})
    assert encoding == ("gzip" if compressed else None)
    assert b"torch_steps_total 0.0" in (gzip.decompress(body) if compressed else body)


def answer(headers: dict[str, str]) -> tuple[str, str | None, bytes]:
    """Scrape, with these headers and no others that say what is taken."""
    with torchotel.instrument(traces_exporter="none") as handle:
        connection = HTTPConnection("127.0.0.1", handle.prometheus_port, timeout=10)
        connection.putrequest("GET", "/metrics", skip_accept_encoding=True)
        for name, text in headers.items():
            connection.putheader(name, text)
        connection.endheaders()
        response = connection.getresponse()
        body = response.read()
        connection.close()
    return response.headers["Content-Type"], response.headers["Content-Encoding"], body
