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
        ('Application/OpenMetrics-Text; Version="1.0.0"', True),
        ("text/plain;version=0.0.4, application/openmetrics-text", True),
        ("text/*;q=0, */*", True),
        ("text/plain;version=0.0.4;q=1,application/openmetrics-text;q=0", False),
        ("*/*,application/openmetrics-text;q=0", False),
        ("text/plain,application/openmetrics-text;q=0.5", False),
        ("application/openmetrics-text;version=0.0.1", False),
        ("application/openmetrics-text;version=2.0.0,*/*;q=0.1", False),
        ("application/openmetrics-text;q=nan", False),
        ("*/*", False),
        ("image/png", False),
        ("", False),
    ],
)
def test_the_format_is_the_one_that_is_liked_best(accept: str, openmetrics: bool) -> None:  # noqa: FBT001  # a parameter of the test
    """Of the two, in the version that we write; a quality of 0 refuses."""
    kind, _, body = answer({"Accept": accept})
    assert kind.startswith("application/openmetrics-text; version=1.0.0" if openmetrics else "text/plain")
    assert body.endswith(b"# EOF\n") == openmetrics


@pytest.mark.parametrize(
    ("accept", "compressed"),
    [
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("*", True),
        ("gzip;q=0", False),
        ("gzip;q=0.000, *", False),
        ("identity", False),
        ("not-gzip", False),
        ("", False),
    ],
)
def test_is_compressed_where_that_is_taken(accept: str, compressed: bool) -> None:  # noqa: FBT001  # a parameter of the test
    """And not where it is refused."""
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
