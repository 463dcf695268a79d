"""Send requests over HTTP."""

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
from urllib3.exceptions import HTTPError

from torchotel._limits import MAX_RETRY_AFTER_S
from torchotel.config.otlp_endpoint import OtlpEndpoint, host_without_proxy
from torchotel.exporters.otlp.transport import Reply, Transport, taken

MAX_ANSWER_BYTES = 64 * 1024
"""What is read of an answer; an endpoint that never stops talking must not fill the memory."""
# https://opentelemetry.io/docs/specs/otlp/#retryable-response-codes
_RETRYABLE = frozenset({429, 502, 503, 504})
_PAGE = "text/html"
_PROTOBUF = "application/x-protobuf"
_GZIP_WBITS = 31
_URLLIB3 = "urllib3.connectionpool"
_OK = range(200, 300)


class Answer(NamedTuple):
    """What an endpoint says over HTTP, before anybody reads it."""

    status: int
    reason: str
    headers: Mapping[str, str]
    """Their names in any case."""
    content: bytes
    """Its beginning: what came in time, at most `MAX_ANSWER_BYTES`."""


class _Connected(NamedTuple):
    """What all requests have in common."""

    session: requests.Session
    request: requests.PreparedRequest
    """Without its body."""
    settings: Mapping[str, Any]
    """Proxies and certificates, as the environment named them at the first request."""


class HttpTransport(Transport):
    """POST with `requests`, which opentelemetry-exporter-otlp brings along and which knows proxies.

    Args:
        receiver: Endpoint and settings. Its timeout bounds the connection and each wait for a part of the response.
            The body is read no longer than the timeout; a response whose head arrives byte by byte is not bounded.
        version: Of torchotel, for the User-Agent.
    """

    def __init__(self, receiver: OtlpEndpoint, *, version: str) -> None:
        self.endpoint = receiver.shown
        self._receiver = receiver
        self._url = receiver.endpoint
        self._gzip = receiver.compression == "gzip"
        self._timeout_s = receiver.timeout_s
        self._verify = receiver.certificate or True
        certificate, key = receiver.client_certificate, receiver.client_key
        self._cert = (certificate, key) if certificate and key else certificate
        self._headers = {
            "User-Agent": f"torchotel/{version}",
            **receiver.headers,
            "Content-Type": _PROTOBUF,
            "Accept-Encoding": "identity",  # an answer is a few bytes, and what is not compressed is no bomb
        }
        if self._gzip:
            self._headers["Content-Encoding"] = "gzip"
        self._connected: _Connected | None = None

    def pack(self, body: bytes) -> bytes:
        """Compress at the fastest level, enough for spans that repeat themselves; without the GIL."""
        if not self._gzip:
            return body
        gzip = zlib.compressobj(1, zlib.DEFLATED, _GZIP_WBITS)
        return gzip.compress(body) + gzip.flush()

    def send(self, body: bytes, timeout_s: float | None) -> Reply:
        """Post once."""
        limit_s = self._timeout_s if timeout_s is None else max(0.001, min(self._timeout_s, timeout_s))
        try:
            return self._post(body, limit_s)
        except Exception as error:  # noqa: BLE001  # the thread must outlive whatever an endpoint does
            return _failure(error, self._receiver)

    def close(self) -> None:
        """Close the kept connection."""
        if self._connected is not None:
            self._connected.session.close()
            self._connected = None
            logging.getLogger(_URLLIB3).removeFilter(self._may_be_logged)

    def _post(self, body: bytes, limit_s: float) -> Reply:
        answer = self.ask(body, limit_s)
        kind = answer.headers.get("Content-Type", "")
        if answer.status in _OK and kind.startswith(_PAGE):  # some receivers answer with plain text, or with nothing
            text = f"it answered {answer.status} with {_PAGE}, so it is no OTLP receiver"
            return Reply(error_type="no_otlp", text=text)
        if answer.status in _OK:
            return taken(answer.content, self._receiver)
        words = ": ".join(filter(None, (answer.reason, error_message(answer))))
        return Reply(
            error_type=str(answer.status),
            text=f"it answered {answer.status} {self._receiver.quote(words)}".rstrip(),
            retry=answer.status in _RETRYABLE,
            retry_after_s=retry_after_s(answer.headers.get("Retry-After")),
        )

    def ask(self, body: bytes, limit_s: float) -> Answer:
        """Post once and give the answer as it came; raise what `requests` raises."""
        deadline_s = time.monotonic() + limit_s
        session, request, settings = self._connected or self._connect()
        request = request.copy()  # others' hooks may write into it
        if session.cookies:  # a balancer's, which says by them who is to answer
            request.prepare_cookies(session.cookies)
        request.body, request.headers["Content-Length"] = body, str(len(body))
        # A redirected POST turns into a GET, or leads the headers elsewhere.
        answer = session.send(request, timeout=limit_s, allow_redirects=False, **settings)
        with answer:
            # Read also what is not looked at: only a connection that was read to its end is used again.
            return Answer(answer.status_code, answer.reason or "", answer.headers, _beginning(answer, deadline_s))

    def _connect(self) -> _Connected:
        """Look up once what each request would look up again, a third of its time, holding the GIL."""
        session = requests.Session()
        user = requests.utils.get_auth_from_url(self._url)
        said = any(name.lower() == "authorization" for name in self._headers)
        # Without an auth a session takes one from ~/.netrc, over the Authorization that was configured.
        session.auth = user if any(user) and not said else lambda request: request
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
        """Keep back what urllib3 says at level DEBUG of a request of ours: its query may be a key."""
        query = self._url.partition("?")[2]
        return not any(isinstance(word, str) and query in word for word in record.args or ())


def _beginning(answer: requests.Response, deadline_s: float) -> bytes:
    """Read the body until the deadline, without raising: the status alone decides about a retry."""
    raw, content = answer.raw, b""
    read = getattr(raw, "read1", raw.read)  # which urllib3 1 lacks
    with suppress(Exception):
        while len(content) < MAX_ANSWER_BYTES and time.monotonic() < deadline_s:
            piece = read(MAX_ANSWER_BYTES - len(content), decode_content=False)
            if not piece:
                break
            content += piece
    return content


def error_message(answer: Answer) -> str:
    """Return the server's message in an error: OTLP's is a `google.rpc.Status` in protobuf or JSON.

    https://opentelemetry.io/docs/specs/otlp/#failures
    """
    kind = answer.headers.get("Content-Type", "")
    if kind.startswith(_PROTOBUF):
        from google.rpc.status_pb2 import Status  # noqa: PLC0415  # sending does not need protobuf

        with suppress(Exception):  # the status is what counts
            return str(Status.FromString(answer.content).message)
        return ""
    text = answer.content.decode("utf-8", "replace")
    with suppress(ValueError, RecursionError, TypeError, KeyError):
        text = str(json.loads(text)["message"])
    return "" if text.lstrip().startswith("<") else text  # a page of HTML has no message in one line


def retry_after_s(header: str | None) -> float | None:
    """Read a Retry-After of seconds or of a date; None where it says nothing."""
    if header is None:
        return None
    text = header.strip()
    if text.isascii() and text.isdigit():
        return min(float(text), MAX_RETRY_AFTER_S)
    try:
        until = parsedate_to_datetime(text)
    except (ValueError, OverflowError):  # the second where its time zone is days away
        return None
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return min(max((until - datetime.now(UTC)).total_seconds(), 0.0), MAX_RETRY_AFTER_S)


def _failure(error: Exception, receiver: OtlpEndpoint) -> Reply:
    passing = (
        requests.ConnectionError,
        requests.Timeout,
        requests.exceptions.ChunkedEncodingError,
        HTTPError,
    )
    root: BaseException = error
    while isinstance(inner := root.__cause__ or root.__context__, OSError | HTTPError):
        root = inner  # requests wraps urllib3, which wraps the socket's own, shortest words
    return Reply(
        error_type=type(error).__name__,
        text=f"{type(error).__name__}: {receiver.quote(root)}",
        retry=isinstance(error, passing),
        answered=False,
    )
