"""One attempt to bring a request to an OTLP/HTTP endpoint, and what came of it."""

import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import requests

MAX_RETRY_AFTER_S = 60.0
"""Longest wait that an endpoint may ask for; what it asks beyond that is not known to end."""
MAX_ANSWER_BYTES = 64 * 1024
"""What is read of an answer; an endpoint that never stops talking must not fill the memory."""
# https://opentelemetry.io/docs/specs/otlp/#retryable-response-codes
_RETRYABLE = frozenset({429, 502, 503, 504})
_GZIP_WBITS = 31
_OK = range(200, 300)


class Reply(NamedTuple):
    """What came of an attempt; all of its spans arrived where nothing else is said."""

    error_type: str | None = None
    """An HTTP status or a class of exception; None: the request was taken."""
    text: str = ""
    """What happened, for a log line."""
    retry: bool = False
    """Whether another attempt may go better."""
    answered: bool = True
    """Whether anybody was there."""
    retry_after_s: float | None = None
    """The wait that the endpoint asks for."""
    rejected: int = 0
    """Spans that a request which was taken lost all the same."""


class Answer(NamedTuple):
    """What an endpoint says over HTTP, before anybody reads it."""

    status: int
    reason: str
    headers: Mapping[str, str]
    """Their names in any case."""
    content: bytes
    """Its beginning, at most `MAX_ANSWER_BYTES`."""


class Transport(Protocol):
    """A way to an endpoint. Every method but `prepare` is called on the sender's thread."""

    endpoint: str
    """Where it leads, for a log line: without credentials."""

    def prepare(self) -> None:
        """Load what is slow to load."""

    def pack(self, body: bytes) -> bytes:
        """Make of a request what `send` takes, once for all its attempts."""

    def send(self, body: bytes, timeout_s: float | None) -> Reply:
        """Attempt once, not longer than `timeout_s` or its own limit, whichever is less; never raise."""

    def close(self) -> None:
        """Let go of connections."""


class HttpTransport:
    """POST protobuf with `requests`, which opentelemetry-exporter-otlp brings along and which knows proxies.

    Args:
        url: Full URL, ending in `/v1/traces`.
        headers: Sent with each request.
        compression: "gzip" or "none".
        timeout_s: For the connection, and for each wait for an answer.
        verify: File of CA certificates; True: the system's; False: none is asked for.
        cert: File of the client's certificate with its key, or one file for each.
        version: Of torchotel, for the User-Agent.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str],
        compression: str,
        timeout_s: float,
        verify: bool | str,
        cert: str | tuple[str, str] | None,
        version: str,
    ) -> None:
        self.endpoint = without_credentials(url)
        self._url = url
        self._gzip = compression == "gzip"
        self._timeout_s = timeout_s
        self._verify = verify
        self._cert = cert
        self._headers = {
            "User-Agent": f"torchotel/{version}",
            **headers,
            "Content-Type": "application/x-protobuf",
        }
        if self._gzip:
            self._headers["Content-Encoding"] = "gzip"
        self._session: requests.Session | None = None

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
            return _failure(error)

    def close(self) -> None:
        """Close the kept connection."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _post(self, body: bytes, limit_s: float) -> Reply:
        answer = self.ask(body, limit_s)
        if answer.status in _OK:
            return _taken(answer.content)
        return Reply(
            error_type=str(answer.status),
            text=f"it answered {answer.status} {answer.reason}".rstrip(),
            retry=answer.status in _RETRYABLE,
            retry_after_s=retry_after_s(answer.headers.get("Retry-After")),
        )

    def ask(self, body: bytes, limit_s: float) -> Answer:
        """Post once and give the answer as it came; raise what `requests` raises."""
        session = self._session or self._open()
        answer = session.post(
            self._url,
            data=body,
            headers=self._headers,
            timeout=limit_s,
            verify=self._verify,
            cert=self._cert,
            allow_redirects=False,  # a redirected POST turns into a GET, or leads the headers elsewhere
            stream=True,
        )
        with answer:
            # Read also what is not looked at: only a connection that was read to its end is used again.
            content = answer.raw.read(MAX_ANSWER_BYTES, decode_content=True)
            return Answer(answer.status_code, answer.reason or "", answer.headers, content)

    def prepare(self) -> None:
        """Load `requests`."""
        import requests  # noqa: F401, PLC0415  # 100 ms

    def _open(self) -> "requests.Session":
        import requests  # noqa: PLC0415  # 100 ms, and only where something is sent

        self._session = session = requests.Session()
        # Without an auth a session takes one from ~/.netrc, over the Authorization that was configured.
        session.auth = lambda request: request
        return session


def without_credentials(url: str) -> str:
    """Cut user, password and query off a URL."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def retry_after_s(header: str | None) -> float | None:
    """Read a Retry-After of seconds or of a date; None where it says nothing."""
    if header is None:
        return None
    text = header.strip()
    if text.isascii() and text.isdigit():
        return min(float(text), MAX_RETRY_AFTER_S)
    try:
        until = parsedate_to_datetime(text)
    except ValueError:
        return None
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return min(max((until - datetime.now(UTC)).total_seconds(), 0.0), MAX_RETRY_AFTER_S)


def _taken(content: bytes) -> Reply:
    """Look for the spans that the endpoint took the request without; a plain success has no content."""
    if not content:
        return Reply()
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (  # noqa: PLC0415  # slow, and rare
        ExportTraceServiceResponse,
    )

    try:
        partial = ExportTraceServiceResponse.FromString(content).partial_success
    except Exception:  # noqa: BLE001  # some servers answer with a page or JSON; the status is what counts
        return Reply()
    return Reply(rejected=max(0, partial.rejected_spans), text=partial.error_message)


def _failure(error: Exception) -> Reply:
    import requests  # noqa: PLC0415  # not before something was sent
    from urllib3.exceptions import HTTPError  # noqa: PLC0415

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
        text=f"{type(error).__name__}: {root}",
        retry=isinstance(error, passing),
        answered=False,
    )
