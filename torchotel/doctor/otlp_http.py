"""Check an OTLP endpoint over HTTP."""

import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.utils import DEFAULT_CA_BUNDLE_PATH, get_environ_proxies, select_proxy

from torchotel.config.otlp_endpoint import Address, OtlpEndpoint, host_without_proxy, without_credentials
from torchotel.doctor import clock, tls
from torchotel.doctor.network import Request, check_connectivity, detect_protocol, with_timeout
from torchotel.doctor.result import CheckFailed, Finding, ok, warning
from torchotel.exporters.otlp.http import Answer, HttpTransport, error_message

_PROTOBUF = "application/x-protobuf"
_NO_RECEIVER = (
    "Another server listens there. OTLP over HTTP is port 4318 of a Collector or of Jaeger; 16686 is Jaeger's page, "
    "4317 is gRPC."
)
_BUSY = frozenset({429, 502, 503, 504})
_HEADERS_ASKED = frozenset({401, 403})
_NO_SUCH_PATH = frozenset({404, 405})


def evaluate_response(subject: str, answer: Answer, response: Any, otlp_endpoint: OtlpEndpoint) -> Finding:
    """Return a finding on an accepted request.

    Args:
        subject: Subject of the finding.
        answer: The endpoint's HTTP response.
        response: Type of the expected response message.
        otlp_endpoint: The endpoint.

    Raises:
        CheckFailed: The endpoint did not accept the request.
    """
    shown = otlp_endpoint.shown
    if answer.status // 100 != 2:  # noqa: PLR2004 - the class of statuses that mean success
        raise _refused(answer, otlp_endpoint, shown)
    kind = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind not in {"", _PROTOBUF}:
        text = f"{shown} answered {answer.status} with {otlp_endpoint.quote(kind)}, which is not an OTLP response"
        raise CheckFailed(text, _NO_RECEIVER)
    try:
        partial = response.FromString(answer.content).partial_success
    except Exception:  # noqa: BLE001 - protobuf raises various types for foreign bytes
        raise CheckFailed(
            f"{shown} answered {answer.status} with a body that is not an OTLP response", _NO_RECEIVER
        ) from None
    return _accepted(subject, partial, otlp_endpoint, shown, has_content_type=bool(kind))


def _accepted(
    subject: str, partial: Any, otlp_endpoint: OtlpEndpoint, shown: str, *, has_content_type: bool
) -> Finding:
    message = otlp_endpoint.quote(partial.error_message)
    rejected = getattr(partial, "rejected_spans", 0) or getattr(partial, "rejected_data_points", 0)
    if rejected:
        raise CheckFailed(
            f"{shown} accepted the request and rejected its content: {message or 'no reason given'}", _REASON
        )
    if message:
        return warning(subject, f"{shown} accepted the request with a warning: {message}", _REASON)
    if not has_content_type:
        text = f"{shown} answered 200 without a Content-Type, so it may not be an OTLP receiver"
        return warning(
            subject, text, "Check that the test span arrived: a server that answers 200 to every request loses spans."
        )
    return ok(subject, f"{shown} accepts OTLP")


_REASON = "The endpoint gave this reason. Check its log."


def _refused(answer: Answer, otlp_endpoint: OtlpEndpoint, shown: str) -> CheckFailed:
    reason = otlp_endpoint.quote(error_message(answer))
    text = f"{shown} answered {answer.status} {otlp_endpoint.quote(answer.reason)}".rstrip()
    if reason:
        text += f": {reason}"
    return CheckFailed(text, _advise(answer, otlp_endpoint, shown))


def _advise(answer: Answer, otlp_endpoint: OtlpEndpoint, shown: str) -> str:
    status = answer.status
    if status in _HEADERS_ASKED:
        return _advise_headers(otlp_endpoint)
    if status in _BUSY:
        return (
            "This may be temporary. In a run, such requests are retried for about a minute, then dropped and counted."
        )
    if status in _NO_SUCH_PATH:
        return _advise_path(shown)
    if status // 100 == 3:  # noqa: PLR2004 - the class of statuses that lead elsewhere
        to = otlp_endpoint.quote(without_credentials(answer.headers.get("Location", "?")))
        return f"Redirects are not followed. Set the endpoint to the target of the redirect: {to}"
    return _ADVICE.get(status, "Check the endpoint's log.")


def _advise_headers(otlp_endpoint: OtlpEndpoint) -> str:
    names = ", ".join(otlp_endpoint.headers) or "none"
    return (
        f"Headers that were sent: {names}. Check OTEL_EXPORTER_OTLP_HEADERS (name=value, comma-separated, "
        "values URL-encoded: a blank is %20)."
    )


def _advise_path(shown: str) -> str:
    path = urlsplit(shown).path
    if path.count("/v1/") > 1:
        return "OTEL_EXPORTER_OTLP_ENDPOINT is a base URL, to which /v1/traces is appended: remove that path."
    if not path.endswith(("/v1/traces", "/v1/metrics")):
        return (
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is used unchanged, so it must end in /v1/traces. That path is appended "
            "to OTEL_EXPORTER_OTLP_ENDPOINT only."
        )
    return f"There is no OTLP receiver at {path} of that server. " + _NO_RECEIVER


_ADVICE = {
    400: "The endpoint could not read the request. A proxy may have changed it.",
    407: "The proxy requires a password: set it in HTTP_PROXY or HTTPS_PROXY, or bypass the proxy with NO_PROXY.",
    413: "Even one span is too large for the endpoint: raise the endpoint's limit.",
    415: "The endpoint does not accept protobuf. A receiver of OTLP over HTTP must accept application/x-protobuf.",
}


_OTHERS = {
    "gRPC": "The server there uses gRPC. Use the port of OTLP over HTTP, usually 4318, or set the protocol to grpc.",
    "TLS": "The server there uses TLS: use https:// instead of http:// in the endpoint.",
}
_SILENT = "The server there hangs, or is not a receiver of OTLP over HTTP: check its log."
_BAD_REQUEST = 400


def call(request: Request) -> Iterator[Finding]:
    """Check name, connection and TLS, then send the request.

    Raises:
        CheckFailed: One of these steps failed.
    """
    otlp_endpoint = request.otlp_endpoint
    address = otlp_endpoint.address
    assert address is not None  # noqa: S101 - a validated URL has a host
    proxies = get_environ_proxies(otlp_endpoint.endpoint, no_proxy=host_without_proxy(otlp_endpoint.endpoint))
    proxy = select_proxy(otlp_endpoint.endpoint, proxies)
    if proxy is None:
        check_connectivity(address, request.step_s)
        if address.tls:
            yield from tls.check_server(address, otlp_endpoint, _authorities(otlp_endpoint), "http/1.1", request.step_s)
    sent_s = time.time()
    answer = _post(request, address, proxy)
    difference = clock.compare_with_server(answer.headers.get("Date"), sent_s, time.time())
    yield evaluate_response(request.subject, answer, request.response, otlp_endpoint)
    if difference is not None:
        yield difference


def _authorities(otlp_endpoint: OtlpEndpoint) -> str:
    """Return the file of authorities that `requests` trusts: the configured one, its variables', or its default."""
    settings = requests.Session().merge_environment_settings(
        otlp_endpoint.endpoint, {}, stream=True, verify=otlp_endpoint.certificate or True, cert=None
    )
    verify = settings["verify"]
    return str(DEFAULT_CA_BUNDLE_PATH if verify is True else verify)


def _post(request: Request, address: Address, proxy: str | None) -> Answer:
    transport = HttpTransport(request.otlp_endpoint, version=request.version)
    body = transport.pack(request.body)
    try:
        # The resolver has no timeout, and the connect timeout applies to each address of a host.
        answer = with_timeout(2 * request.limit_s, lambda: transport.ask(body, request.limit_s))
    except Exception as error:  # noqa: BLE001 - any failure becomes a finding
        raise _unanswered(request, address, proxy, error) from None
    finally:
        transport.close()
    if answer.status == _BAD_REQUEST and proxy is None and detect_protocol(address, request.step_s) == "TLS":
        raise _not_http(request, "TLS")
    return answer


def _unanswered(request: Request, address: Address, proxy: str | None, error: Exception) -> CheckFailed:
    shown = request.otlp_endpoint.shown
    cause = request.otlp_endpoint.quote(_root(error))
    if proxy is not None:
        text = f"{shown} could not be reached through the proxy {without_credentials(proxy)}: {cause}"
        return CheckFailed(
            text, "HTTP_PROXY and HTTPS_PROXY apply to telemetry too: add the endpoint's host to NO_PROXY."
        )
    other = detect_protocol(address, request.step_s)
    if other in _OTHERS:
        return _not_http(request, other)
    if isinstance(error, TimeoutError | requests.Timeout):
        return CheckFailed(f"{shown} accepted the request but did not answer within {request.limit_s:g} s", _SILENT)
    return CheckFailed(f"{shown} gave no OTLP response: {cause}", tls.WANTS_CERTIFICATE if address.tls else _SILENT)


def _not_http(request: Request, other: str) -> CheckFailed:
    return CheckFailed(f"{request.otlp_endpoint.shown} gave no HTTP response", _OTHERS[other])


def _root(error: BaseException) -> BaseException:
    """Return the innermost exception: `requests` wraps urllib3's exception, which wraps the socket's."""
    while isinstance(inner := error.__cause__ or error.__context__, Exception):
        error = inner
    return error
