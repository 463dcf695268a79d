"""Send OTLP requests as unary gRPC calls."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import grpc
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from torchotel._limits import MAX_RETRY_AFTER_S
from torchotel.config.otlp_endpoint import OtlpEndpoint, address_of, host_without_proxy
from torchotel.exporters.otlp.transport import Reply, Signal, Transport, read_success

with suppress(ImportError):  # private; else grpc.insecure_channel() imports it on the sender thread
    import grpc._channel

# https://opentelemetry.io/docs/specs/otlp/#otlpgrpc-response
_RETRYABLE = frozenset({"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"})
_THROTTLED = "RESOURCE_EXHAUSTED"
"""Retried only if the response has a delay; without one the message is too large."""
_UNREACHED = "UNAVAILABLE"
"""Status of gRPC if the server is unreachable, and of an overloaded server; the channel tells which."""
_NO_CONNECTION = "failed to connect to all addresses"
"""Text of gRPC for an unreachable server. The channel may be idle again when its state is read."""
_SILENT = "DEADLINE_EXCEEDED"
_STATE_S = 1.0
"""Timeout for the state of a channel, which a thread of gRPC reports at once."""
_DETAILS = "grpc-status-details-bin"
"""Trailer with a `google.rpc.Status`."""
_OURS = ("user-agent", "content-type", "te", "grpc-")
"""Headers that gRPC sets itself."""

_logger = logging.getLogger("torchotel")


class Target(NamedTuple):
    """Address of a gRPC server."""

    address: str
    secure: bool


class GrpcTransport(Transport):
    """Send requests with grpcio, a dependency of opentelemetry-exporter-otlp.

    Args:
        otlp_endpoint: Endpoint and its settings; the timeout is a deadline of the whole call.
        signal: The signal, whose service is called.
        version: Version of torchotel for the User-Agent.
    """

    def __init__(self, otlp_endpoint: OtlpEndpoint, signal: Signal, *, version: str) -> None:
        self._target = read_target(otlp_endpoint.endpoint, insecure=otlp_endpoint.insecure)
        self.endpoint = self._target.address
        self._otlp_endpoint, self._signal, self._version = otlp_endpoint, signal, version
        self._metadata = tuple(metadata(otlp_endpoint.headers))
        self._channel: grpc.Channel | None = None
        self._call: grpc.UnaryUnaryMultiCallable[bytes, bytes] | None = None

    def pack(self, body: bytes) -> bytes:
        """Return the body unchanged: gRPC compresses messages."""
        return body

    def send(self, body: bytes, timeout_s: float | None) -> Reply:
        """Call the service once; never raises."""
        limit_s = self._otlp_endpoint.timeout_s
        limit_s = limit_s if timeout_s is None else max(0.001, min(limit_s, timeout_s))
        try:
            call = self._call or self._open()
            response = call(body, timeout=limit_s, metadata=self._metadata)
            return read_success(response, ExportTraceServiceResponse, self._otlp_endpoint)
        except Exception as error:  # noqa: BLE001  # the sender thread must not end
            reply = _failure(error, self._otlp_endpoint, self._channel)
            if not reply.answered:
                self.close()  # a failed channel delays reconnecting more and more; the sender has its own delays
            return reply

    def close(self) -> None:
        """Close the channel."""
        channel, self._channel, self._call = self._channel, None, None
        if channel is not None:
            channel.close()

    def _open(self) -> grpc.UnaryUnaryMultiCallable[bytes, bytes]:
        # A separate pool: the program's channels to the same address must not share failures.
        options: list[tuple[str, str | int]] = [
            ("grpc.primary_user_agent", f"torchotel/{self._version}"),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if host_without_proxy(self._otlp_endpoint.endpoint) is not None:
            options.append(("grpc.enable_http_proxy", 0))
        address, compressed = self._target.address, compression(self._otlp_endpoint)
        if self._target.secure:
            channel = grpc.secure_channel(address, credentials(self._otlp_endpoint), options, compressed)
        else:
            channel = grpc.insecure_channel(address, options, compressed)
        self._channel = channel
        self._call = channel.unary_unary(self._signal.method)  # without serialisation: bytes
        return self._call


def read_target(endpoint: str, *, insecure: bool) -> Target:
    """Parse a URL, whose scheme tells whether to use TLS, or a gRPC target: `host:port`, `unix:/path`."""
    address = address_of(endpoint, insecure=insecure)
    if address is not None:
        return Target(str(address), address.tls)
    return Target(endpoint if endpoint.startswith("unix") else endpoint.rpartition("@")[2], secure=not insecure)


def metadata(headers: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """Return the headers as gRPC metadata: lower-case names, without binary headers (`-bin`)."""
    for name, value in headers.items():
        if name.lower().endswith("-bin"):
            # The value may be a secret.
            _logger.warning("The OTLP header %s is left out: gRPC takes bytes for a name in -bin", name)
        elif not name.lower().startswith(_OURS):
            yield name.lower(), value


def compression(otlp_endpoint: OtlpEndpoint) -> grpc.Compression:
    """Return the compression of requests."""
    return grpc.Compression.Gzip if otlp_endpoint.compression == "gzip" else grpc.Compression.NoCompression


def credentials(otlp_endpoint: OtlpEndpoint) -> grpc.ChannelCredentials:
    """Read the certificates for TLS."""

    def read(file: str | None) -> bytes | None:
        return None if file is None else Path(file).read_bytes()

    certificate = read(otlp_endpoint.client_certificate)
    key = read(otlp_endpoint.client_key) or certificate
    return grpc.ssl_channel_credentials(read(otlp_endpoint.certificate), key, certificate)


def _failure(error: Exception, otlp_endpoint: OtlpEndpoint, channel: grpc.Channel | None) -> Reply:
    if not (isinstance(error, grpc.RpcError) and isinstance(error, grpc.Call)):
        return Reply(type(error).__name__, f"{type(error).__name__}: {otlp_endpoint.quote(error)}", answered=False)
    code = error.code().name
    asked_s, details = _retry_after_s(error.trailing_metadata() or ()), error.details() or ""
    retry = code in _RETRYABLE or (code == _THROTTLED and asked_s is not None)
    return Reply(
        error_type=code,
        text=f"{code}: {otlp_endpoint.quote(details)}".rstrip(": "),
        retry=retry,
        answered=asked_s is not None or _is_answer(code, details, channel),
        retry_after_s=asked_s if retry else None,
    )


def _is_answer(code: str, details: str, channel: grpc.Channel | None) -> bool:
    """Return whether the server sent the status."""
    if code != _UNREACHED:
        return code != _SILENT
    return not details.startswith(_NO_CONNECTION) and _connects(channel)


def _connects(channel: grpc.Channel | None) -> bool:
    """Return whether a failed call had a connection, which the channel still has or has just lost."""
    if channel is None:
        return False
    states: queue.SimpleQueue[grpc.ChannelConnectivity] = queue.SimpleQueue()
    try:
        channel.subscribe(states.put)
        return states.get(timeout=_STATE_S) in {grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.IDLE}
    except (queue.Empty, RuntimeError):  # the interpreter is ending and starts no more threads
        return False
    finally:
        channel.unsubscribe(states.put)


def _retry_after_s(trailers: Iterable[tuple[str, str | bytes]]) -> float | None:
    """Return the delay of a response's RetryInfo; None: it has none."""
    details = dict(trailers).get(_DETAILS)
    if not isinstance(details, bytes):
        return None
    info = RetryInfo()
    try:
        if not any(detail.Unpack(info) for detail in Status.FromString(details).details):
            return None
    except Exception:  # noqa: BLE001  # the details may be anything; the status suffices
        return None
    delay_s: float = info.retry_delay.seconds + info.retry_delay.nanos / 1e9
    return min(max(delay_s, 0.0), MAX_RETRY_AFTER_S)
