"""Check an OTLP endpoint over gRPC."""

import os
from collections.abc import Iterator

from requests.utils import DEFAULT_CA_BUNDLE_PATH

from torchotel.config.otlp_endpoint import Address
from torchotel.doctor import tls
from torchotel.doctor.network import Request, check_connectivity, detect_protocol, with_timeout
from torchotel.doctor.result import CheckFailed, Finding, ok, warning
from torchotel.exporters.otlp.grpc import GrpcTransport, Target, read_target
from torchotel.exporters.otlp.transport import Reply

_ROOTS = "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"
_OTHER_PROTOCOLS = {
    "HTTP": (
        "The server there uses HTTP. Use the port of OTLP over gRPC, usually 4317, or set "
        "OTEL_EXPORTER_OTLP_PROTOCOL to http/protobuf."
    ),
    "TLS": "The server there uses TLS: use https:// in the endpoint, and unset OTEL_EXPORTER_OTLP_INSECURE.",
}
_ADVICE = {
    "UNIMPLEMENTED": "The gRPC server there has no OTLP service for this signal. OTLP over gRPC is usually port 4317.",
    "DEADLINE_EXCEEDED": "The server there hangs, or is not an OTLP receiver: check its log.",
    "RESOURCE_EXHAUSTED": "This may be temporary. In a run, such requests are retried if the endpoint names a delay.",
}
_HEADERS_ASKED = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED"})


def call(request: Request) -> Iterator[Finding]:
    """Check name, connection and TLS, then send the request.

    Raises:
        CheckFailed: One of these steps failed.
    """
    otlp_endpoint = request.otlp_endpoint
    target = read_target(otlp_endpoint.endpoint, insecure=otlp_endpoint.insecure)
    address = otlp_endpoint.address
    if address is not None:
        check_connectivity(address, request.step_s)
        if address.tls:
            authorities = otlp_endpoint.certificate or os.environ.get(_ROOTS) or DEFAULT_CA_BUNDLE_PATH
            yield from tls.check_server(address, otlp_endpoint, authorities, "h2", request.step_s)
    yield _evaluate(request, target, address, _send(request))


def _send(request: Request) -> Reply:
    transport = GrpcTransport(request.otlp_endpoint, request.signal, version=request.version)
    try:
        return with_timeout(2 * request.limit_s, lambda: transport.send(request.body, request.limit_s))
    except TimeoutError as error:
        return Reply("DEADLINE_EXCEEDED", str(error))
    finally:
        transport.close()


def _evaluate(request: Request, target: Target, address: Address | None, reply: Reply) -> Finding:
    text = reply.text
    if reply.error_type is None and reply.rejected:
        problem = f"{target.address} accepted the request and rejected its content: {text or 'no reason given'}"
        raise CheckFailed(problem, "The endpoint gave this reason. Check its log.")
    if reply.error_type is None and text:
        return warning(
            request.subject,
            f"{target.address} accepted the request with a warning: {text}",
            "Check the endpoint's log.",
        )
    if reply.error_type is None:
        return ok(request.subject, f"{target.address} accepts OTLP over gRPC")
    if reply.error_type in _HEADERS_ASKED:
        names = ", ".join(request.otlp_endpoint.headers) or "none"
        advice = f"Headers that were sent: {names}. Check OTEL_EXPORTER_OTLP_HEADERS."
        raise CheckFailed(f"{target.address} refused the request: {text}", advice)
    protocol = "" if address is None else detect_protocol(address, request.step_s)
    advice = _OTHER_PROTOCOLS.get(protocol) or _ADVICE.get(reply.error_type) or _fallback_advice(reply, address)
    raise CheckFailed(f"{target.address} gave no OTLP response over gRPC: {text}", advice)


def _fallback_advice(reply: Reply, address: Address | None) -> str:
    proxies = [name for name in ("grpc_proxy", "https_proxy", "http_proxy") if os.environ.get(name)]
    if proxies:
        return f"gRPC uses the proxy of {proxies[0]}: add the endpoint's host to no_proxy."
    if reply.error_type == "UNAVAILABLE" and address is not None and address.tls:
        return tls.WANTS_CERTIFICATE
    return "Check the endpoint's log."
