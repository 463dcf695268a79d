"""Choose the transport that a receiver speaks."""

from torchotel.config.otlp_endpoint import Receiver
from torchotel.exporters.otlp.signals import Signal
from torchotel.exporters.otlp.transport import Transport


def make_transport(receiver: Receiver, signal: Signal, *, version: str) -> Transport:
    """Make the way of a signal to its receiver; nothing is loaded, and nobody called, before it is used."""
    if receiver.protocol == "grpc":
        from torchotel.exporters.otlp.grpc_transport import GrpcTransport  # noqa: PLC0415  # what is used is loaded

        return GrpcTransport(receiver, signal, version=version)
    from torchotel.exporters.otlp.http_transport import HttpTransport  # noqa: PLC0415  # as above

    return HttpTransport(receiver, version=version)
