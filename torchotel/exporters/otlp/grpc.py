"""OTLP over gRPC: the same bytes, as one unary call."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import grpc

from torchotel._limits import MAX_RETRY_AFTER_S
from torchotel.config.otlp_endpoint import OtlpEndpoint, address_of, host_without_proxy
from torchotel.exporters.otlp.transport import Reply, Signal, Transport, taken

with suppress(ImportError):  # private; grpc.insecure_channel() would import it on the sender's thread
    import grpc._channel

# https://opentelemetry.io/docs/specs/otlp/#otlpgrpc-response
_RETRYABLE = frozenset({"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"})
_THROTTLED = "RESOURCE_EXHAUSTED"
"""To be tried again only where the answer says when: without that it is the message that is too large."""
_UNREACHED = "UNAVAILABLE"
"""What gRPC says where nobody is there, and a server where it cannot take more: the channel knows which."""
_NO_CONNECTION = "failed to connect to all addresses"
"""How gRPC says so; the channel's pause after it may be over before it is asked, and then it seems idle."""
_SILENT = "DEADLINE_EXCEEDED"
_STATE_S = 1.0
"""Longest wait for a channel's state, which is told at once, by a thread of gRPC's."""
_DETAILS = "grpc-status-details-bin"
"""Where gRPC puts a `google.rpc.Status`."""
_OURS = ("user-agent", "content-type", "te", "grpc-")
"""Headers that gRPC writes itself."""

_logger = logging.getLogger("torchotel")


class Target(NamedTuple):
    """Whom gRPC calls."""

    address: str
    secure: bool


class GrpcTransport(Transport):
    """Call with grpcio, which opentelemetry-exporter-otlp requires.

    Args:
        receiver: Where to, and how; its timeout is a deadline for the whole call.
        signal: Whose service is called.
        version: Of torchotel, for the User-Agent.
    """

    def __init__(self, receiver: OtlpEndpoint, signal: Signal, *, version: str) -> None:
        self._target = read_target(receiver.endpoint, insecure=receiver.insecure)
        self.endpoint = self._target.address
        self._receiver, self._signal, self._version = receiver, signal, version
        self._metadata = tuple(metadata(receiver.headers))
        self._channel: grpc.Channel | None = None
        self._call: grpc.UnaryUnaryMultiCallable[bytes, bytes] | None = None

    def pack(self, body: bytes) -> bytes:
        """Leave it as it is: gRPC compresses each message itself."""
        return body

    def send(self, body: bytes, timeout_s: float | None) -> Reply:
        """Call once."""
        limit_s = self._receiver.timeout_s
        limit_s = limit_s if timeout_s is None else max(0.001, min(limit_s, timeout_s))
        try:
            call = self._call or self._open()
            return taken(call(body, timeout=limit_s, metadata=self._metadata), self._receiver)
        except Exception as error:  # noqa: BLE001  # the thread must outlive whatever an endpoint does
            reply = _failure(error, self._receiver, self._channel)
            if not reply.answered:
                self.close()  # a channel that failed waits longer and longer before it looks again; we do that
            return reply

    def close(self) -> None:
        """Close the channel."""
        channel, self._channel, self._call = self._channel, None, None
        if channel is not None:
            channel.close()

    def _open(self) -> grpc.UnaryUnaryMultiCallable[bytes, bytes]:
        gzip = self._receiver.compression == "gzip"
        compression = grpc.Compression.Gzip if gzip else grpc.Compression.NoCompression
        # A pool of its own: a channel of the user's to the same address must not share our failures.
        options: list[tuple[str, str | int]] = [
            ("grpc.primary_user_agent", f"torchotel/{self._version}"),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if host_without_proxy(self._receiver.endpoint) is not None:
            options.append(("grpc.enable_http_proxy", 0))
        address = self._target.address
        if self._target.secure:
            channel = grpc.secure_channel(address, credentials(self._receiver), options, compression)
        else:
            channel = grpc.insecure_channel(address, options, compression)
        self._channel = channel
        self._call = channel.unary_unary(self._signal.method)  # bytes as they are, in and out
        return self._call


def read_target(endpoint: str, *, insecure: bool) -> Target:
    """Read a URL, whose scheme says whether there is TLS, or a target as gRPC writes it: `host:port`, `unix:/path`."""
    address = address_of(endpoint, insecure=insecure)
    if address is not None:
        return Target(str(address), address.tls)
    return Target(endpoint if endpoint.startswith("unix") else endpoint.rpartition("@")[2], secure=not insecure)


def metadata(headers: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """Give headers as gRPC takes them: lower-case names, and none that promises bytes."""
    for name, value in headers.items():
        if name.lower().endswith("-bin"):
            # Its value may be a secret.
            _logger.warning("The OTLP header %s is left out: gRPC takes bytes for a name in -bin", name)
        elif not name.lower().startswith(_OURS):
            yield name.lower(), value


def credentials(receiver: OtlpEndpoint) -> grpc.ChannelCredentials:
    """Read the certificates of a receiver with TLS."""

    def read(file: str | None) -> bytes | None:
        return None if file is None else Path(file).read_bytes()

    certificate = read(receiver.client_certificate)
    key = read(receiver.client_key) or certificate
    return grpc.ssl_channel_credentials(read(receiver.certificate), key, certificate)


def _failure(error: Exception, receiver: OtlpEndpoint, channel: grpc.Channel | None) -> Reply:
    if not (isinstance(error, grpc.RpcError) and isinstance(error, grpc.Call)):
        return Reply(type(error).__name__, f"{type(error).__name__}: {receiver.quote(error)}", answered=False)
    code = error.code().name
    after_s, details = _retry_after_s(error.trailing_metadata() or ()), error.details() or ""
    return Reply(
        error_type=code,
        text=f"{code}: {receiver.quote(details)}".rstrip(": "),
        retry=code in _RETRYABLE or (code == _THROTTLED and after_s is not None),
        answered=after_s is not None or _is_answer(code, details, channel),
        retry_after_s=after_s,
    )


def _is_answer(code: str, details: str, channel: grpc.Channel | None) -> bool:
    """Tell whether a status is the server's own word."""
    if code != _UNREACHED:
        return code != _SILENT
    return not details.startswith(_NO_CONNECTION) and _connects(channel)


def _connects(channel: grpc.Channel | None) -> bool:
    """Tell whether a call that just failed had a connection: the channel has it still, or has lost it since."""
    if channel is None:
        return False
    states: queue.SimpleQueue[grpc.ChannelConnectivity] = queue.SimpleQueue()
    try:
        channel.subscribe(states.put)
        return states.get(timeout=_STATE_S) in {grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.IDLE}
    except (queue.Empty, RuntimeError):  # at the interpreter's end there is no further thread
        return False
    finally:
        channel.unsubscribe(states.put)


def _retry_after_s(trailers: Iterable[tuple[str, str | bytes]]) -> float | None:
    """Read the RetryInfo of an answer; None where there is none."""
    details = dict(trailers).get(_DETAILS)
    if not isinstance(details, bytes):
        return None
    from google.rpc import error_details_pb2, status_pb2  # noqa: PLC0415  # sending does not need protobuf

    info = error_details_pb2.RetryInfo()
    try:
        if not any(detail.Unpack(info) for detail in status_pb2.Status.FromString(details).details):
            return None
    except Exception:  # noqa: BLE001  # whatever an endpoint writes there; the status is what counts
        return None
    delay_s: float = info.retry_delay.seconds + info.retry_delay.nanos / 1e9
    return min(max(delay_s, 0.0), MAX_RETRY_AFTER_S)
