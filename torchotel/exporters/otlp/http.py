"""Send OTLP requests over HTTP."""

import json
import logging
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import requests
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from urllib3.exceptions import HTTPError

from torchotel._limits import MAX_RETRY_AFTER_S
from torchotel.config.otlp_endpoint import OtlpEndpoint, host_without_proxy
from torchotel.exporters.otlp.transport import Reply, Transport, read_success

MAX_ANSWER_BYTES = 64 * 1024
"""Bytes of a response that are read: an endpoint may send an endless response."""
# https://opentelemetry.io/docs/specs/otlp/#retryable-response-codes
_RETRYABLE = frozenset({429, 502, 503, 504})
_PAGE = "text/html"
_PROTOBUF = "application/x-protobuf"
_GZIP_WBITS = 31
_URLLIB3 = "urllib3.connectionpool"
_OK = range(200, 300)


class Answer(NamedTuple):
    """An HTTP response."""

    status: int
    reason: str
    headers: Mapping[str, str]
    """Case-insensitive."""
    content: bytes
    """The first bytes of the body: those before the deadline, at most `MAX_ANSWER_BYTES`."""


class _Connected(NamedTuple):
    """The parts that all requests share."""

    session: requests.Session
    request: requests.PreparedRequest
    """Request without a body."""
    settings: Mapping[str, Any]
    """Proxies and certificates from the environment at the time of the first request."""


class HttpTransport(Transport):
    """POST requests with `requests`, a dependency of opentelemetry-exporter-otlp that supports proxies.

    Args:
        otlp_endpoint: Endpoint and its settings. The timeout bounds connecting and each wait for data.
            The body is read no longer than the timeout; a response whose head arrives byte by byte is not bounded.
        version: Version of torchotel for the User-Agent.
    """

    def __init__(self, otlp_endpoint: OtlpEndpoint, *, version: str) -> None:
        self.endpoint = otlp_endpoint.shown
        self._otlp_endpoint = otlp_endpoint
        self._url = otlp_endpoint.endpoint
        self._gzip = otlp_endpoint.compression == "gzip"
        self._timeout_s = otlp_endpoint.timeout_s
        self._verify = otlp_endpoint.certificate or True
        certificate, key = otlp_endpoint.client_certificate, otlp_endpoint.client_key
        self._cert = (certificate, key) if certificate and key else certificate
        self._headers = {
            "User-Agent": f"torchotel/{version}",
            **otlp_endpoint.headers,
            "Content-Type": _PROTOBUF,
            "Accept-Encoding": "identity",  # responses are small; this prevents decompression bombs
        }
        if self._gzip:
            self._headers["Content-Encoding"] = "gzip"
        self._connected: _Connected | None = None

    def pack(self, body: bytes) -> bytes:
        """Compress at the fastest level, which suffices for repetitive spans; without the GIL."""
        if not self._gzip:
            return body
        gzip = zlib.compressobj(1, zlib.DEFLATED, _GZIP_WBITS)
        return gzip.compress(body) + gzip.flush()

    def send(self, body: bytes, timeout_s: float | None) -> Reply:
        """POST once; never raises."""
        limit_s = self._timeout_s if timeout_s is None else max(0.001, min(self._timeout_s, timeout_s))
        try:
            return self._post(body, limit_s)
        except Exception as error:  # noqa: BLE001  # the sender thread must not end
            return _failure(error, self._otlp_endpoint)

    def close(self) -> None:
        """Close the connection."""
        if self._connected is not None:
            self._connected.session.close()
            self._connected = None
            logging.getLogger(_URLLIB3).removeFilter(self._may_be_logged)

    def _post(self, body: bytes, limit_s: float) -> Reply:
        answer = self.ask(body, limit_s)
        kind = answer.headers.get("Content-Type", "")
        if answer.status in _OK and kind.startswith(_PAGE):  # some receivers respond with plain text or nothing
            text = f"it answered {answer.status} with {_PAGE}, so it is no OTLP receiver"
            return Reply(error_type="no_otlp", text=text)
        if answer.status in _OK:
            return read_success(answer.content, ExportTraceServiceResponse, self._otlp_endpoint)
        words = ": ".join(filter(None, (answer.reason, error_message(answer))))
        retry = answer.status in _RETRYABLE
        return Reply(
            error_type=str(answer.status),
            text=f"it answered {answer.status} {self._otlp_endpoint.quote(words)}".rstrip(),
            retry=retry,
            # A final answer concerns only this request: the endpoint may accept the next request at once.
            retry_after_s=retry_after_s(answer.headers.get("Retry-After")) if retry else None,
        )

    def ask(self, body: bytes, limit_s: float) -> Answer:
        """POST once and return the response; raises the errors of `requests`."""
        deadline_s = time.monotonic() + limit_s
        session, request, settings = self._connected or self._connect()
        request = request.copy()  # hooks of other libraries may change it
        if session.cookies:  # a load balancer routes by its cookies
            request.prepare_cookies(session.cookies)
        request.body, request.headers["Content-Length"] = body, str(len(body))
        # A redirect would change POST to GET or send the headers to another server.
        answer = session.send(request, timeout=limit_s, allow_redirects=False, **settings)
        with answer:
            # Only a connection whose response was read completely is reused.
            return Answer(answer.status_code, answer.reason or "", answer.headers, _beginning(answer, deadline_s))

    def _connect(self) -> _Connected:
        """Prepare the shared parts once: preparing each request takes a third of its time, holding the GIL."""
        session = requests.Session()
        user = requests.utils.get_auth_from_url(self._url)
        has_authorization = any(name.lower() == "authorization" for name in self._headers)
        # Without an auth, a session replaces the configured Authorization header by one from ~/.netrc.
        session.auth = user if any(user) and not has_authorization else lambda request: request
        request = session.prepare_request(requests.Request("POST", self._url, headers=self._headers))
        host = host_without_proxy(self._url)
        proxies = {} if host is None else {"no_proxy": host}
        settings = session.merge_environment_settings(
            request.url or self._url, proxies, stream=True, verify=self._verify, cert=self._cert
        )
        if "?" in self._url:
            logging.getLogger(_URLLIB3).addFilter(self._may_be_logged)
        self._connected = _Connected(session, request, settings)
        return self._connected

    def _may_be_logged(self, record: logging.LogRecord) -> bool:
        """Filter DEBUG records of urllib3 about these requests: the query may contain a key."""
        query = self._url.partition("?")[2]
        return not any(isinstance(word, str) and query in word for word in record.args or ())


def _beginning(answer: requests.Response, deadline_s: float) -> bytes:
    """Read the body until the deadline; never raises, since the status decides about retries."""
    raw, content = answer.raw, b""
    read = getattr(raw, "read1", raw.read)  # missing in urllib3 1
    with suppress(Exception):
        while len(content) < MAX_ANSWER_BYTES and time.monotonic() < deadline_s:
            piece = read(MAX_ANSWER_BYTES - len(content), decode_content=False)
            if not piece:
                break
            content += piece
    return content


def error_message(answer: Answer) -> str:
    """Return the message of an error response, which in OTLP is a `google.rpc.Status` in protobuf or JSON.

    https://opentelemetry.io/docs/specs/otlp/#failures
    """
    kind = answer.headers.get("Content-Type", "")
    if kind.startswith(_PROTOBUF):
        with suppress(Exception):  # the status suffices
            return str(Status.FromString(answer.content).message)
        return ""
    text = answer.content.decode("utf-8", "replace")
    with suppress(ValueError, RecursionError, TypeError, KeyError):
        text = str(json.loads(text)["message"])
    return "" if text.lstrip().startswith("<") else text  # an HTML page has no one-line message


def retry_after_s(header: str | None) -> float | None:
    """Parse a Retry-After header in seconds or as a date; None: missing or malformed."""
    if header is None:
        return None
    text = header.strip()
    if text.isascii() and text.isdigit():
        return min(float(text), MAX_RETRY_AFTER_S)
    try:
        until = parsedate_to_datetime(text)
    except (ValueError, OverflowError):  # OverflowError: a time zone of several days
        return None
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return min(max((until - datetime.now(UTC)).total_seconds(), 0.0), MAX_RETRY_AFTER_S)


def _failure(error: Exception, otlp_endpoint: OtlpEndpoint) -> Reply:
    passing = (
        requests.ConnectionError,
        requests.Timeout,
        requests.exceptions.ChunkedEncodingError,
        HTTPError,
    )
    root: BaseException = error
    while isinstance(inner := root.__cause__ or root.__context__, OSError | HTTPError):
        root = inner  # requests wraps urllib3, which wraps the socket's short message
    return Reply(
        error_type=type(error).__name__,
        text=f"{type(error).__name__}: {otlp_endpoint.quote(root)}",
        retry=isinstance(error, passing),
        answered=False,
    )
