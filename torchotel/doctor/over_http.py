"""One request over HTTP, and what comes of it."""

import time
from collections.abc import Iterator

import requests
from requests.utils import DEFAULT_CA_BUNDLE_PATH, get_environ_proxies, select_proxy

from torchotel._receiver import Address, Receiver, host_without_proxy, without_credentials
from torchotel.doctor import clock, tls
from torchotel.doctor.answers import judge
from torchotel.doctor.finding import Finding
from torchotel.doctor.network import within
from torchotel.doctor.reach import reach, who_is_there
from torchotel.doctor.request import Request
from torchotel.doctor.trouble import Trouble
from torchotel.exporters.otlp.http_transport import Answer, HttpTransport

_OTHERS = {
    "gRPC": "The server there uses gRPC. Use the port of OTLP over HTTP, usually 4318, or set the protocol to grpc.",
    "TLS": "The server there uses TLS: use https:// instead of http:// in the endpoint.",
}
_SILENT = "The server there hangs, or is not a receiver of OTLP over HTTP: check its log."
_BAD_REQUEST = 400


def call(request: Request) -> Iterator[Finding]:
    """Go the whole way: name, connection, TLS, request.

    Raises:
        Trouble: Somewhere on it.
    """
    receiver = request.receiver
    address = receiver.address
    assert address is not None  # noqa: S101 - a URL that was checked has a host
    proxies = get_environ_proxies(receiver.endpoint, no_proxy=host_without_proxy(receiver.endpoint))
    proxy = select_proxy(receiver.endpoint, proxies)
    if proxy is None:
        reach(address, request.step_s)
        if address.tls:
            yield from tls.check_server(address, receiver, _authorities(receiver), "http/1.1", request.step_s)
    sent_s = time.time()
    answer = _post(request, address, proxy)
    difference = clock.compare(answer.headers.get("Date"), sent_s, time.time())
    yield judge(request.subject, answer, request.response, receiver)
    if difference is not None:
        yield difference


def _authorities(receiver: Receiver) -> str:
    """Find what `requests` trusts: the configured file, the variables that it reads, or its own list."""
    settings = requests.Session().merge_environment_settings(
        receiver.endpoint, {}, stream=True, verify=receiver.certificate or True, cert=None
    )
    found = settings["verify"]
    return str(DEFAULT_CA_BUNDLE_PATH if found is True else found)


def _post(request: Request, address: Address, proxy: str | None) -> Answer:
    transport = HttpTransport(request.receiver, version=request.version)
    body = transport.pack(request.body)
    try:
        # The resolver takes no limit at all, and each address of a host is tried for as long.
        answer = within(2 * request.limit_s, lambda: transport.ask(body, request.limit_s))
    except Exception as error:  # noqa: BLE001 - whatever comes of it is what is asked for
        raise _unanswered(request, address, proxy, error) from None
    finally:
        transport.close()
    if answer.status == _BAD_REQUEST and proxy is None and who_is_there(address, request.step_s) == "TLS":
        raise _not_http(request, "TLS")
    return answer


def _unanswered(request: Request, address: Address, proxy: str | None, error: Exception) -> Trouble:
    shown = request.receiver.shown
    what = request.receiver.quote(_root(error))
    if proxy is not None:
        text = f"{shown} could not be reached through the proxy {without_credentials(proxy)}: {what}"
        return Trouble(text, "HTTP_PROXY and HTTPS_PROXY apply to telemetry too: add the endpoint's host to NO_PROXY.")
    other = who_is_there(address, request.step_s)
    if other in _OTHERS:
        return _not_http(request, other)
    if isinstance(error, TimeoutError | requests.Timeout):
        return Trouble(f"{shown} accepted the request but did not answer within {request.limit_s:g} s", _SILENT)
    return Trouble(f"{shown} gave no OTLP response: {what}", tls.WANTS_CERTIFICATE if address.tls else _SILENT)


def _not_http(request: Request, other: str) -> Trouble:
    return Trouble(f"{request.receiver.shown} gave no HTTP response", _OTHERS[other])


def _root(error: BaseException) -> BaseException:
    """Find the shortest words: `requests` wraps urllib3, which wraps the socket's own."""
    while isinstance(inner := error.__cause__ or error.__context__, Exception):
        error = inner
    return error
