"""The port that Prometheus scrapes: whether it is free, who has it, and who can reach it."""

import errno
import socket
from collections.abc import Iterator, Mapping

from torchotel._config import Config
from torchotel._listening import owner_of
from torchotel._ranks import identify, own_port
from torchotel._receiver import is_loopback
from torchotel.doctor.finding import Finding, failed, ok, warning

SUBJECT = "prometheus"
_PORT = "OTEL_EXPORTER_PROMETHEUS_PORT"


def check(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Bind the port of this rank for a moment."""
    if "prometheus" not in config.metrics_exporter or config.prometheus_port is None:
        yield ok(SUBJECT, "no scrape endpoint is configured")
        return
    identity = identify(environ)
    host, port = config.prometheus_host, own_port(config.prometheus_port, identity.local_rank)
    if port == 0 and config.prometheus_port:
        yield warning(
            SUBJECT, "the port of this rank would be above 65535, so any free port is used", f"Lower {_PORT}."
        )
    try:
        _bind(host, port)
    except (OSError, UnicodeError) as error:
        yield _not_to_be_had(host, port, error)
    else:
        of_rank = f" of local rank {identity.local_rank}" if identity.world_size != 1 else ""
        yield ok(SUBJECT, f"port {port}{of_rank} is free on {host}" if port else f"any free port of {host} is used")
    if not is_loopback(host):
        text = f"metrics are served on {host} to every client that can reach it"
        yield warning(
            SUBJECT,
            text,
            "They hold names of modules and logged values. Set prometheus_host to 127.0.0.1 for this machine only.",
        )


def _bind(host: str, port: int) -> None:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server itself does
        probe.bind(address)
        probe.listen(1)  # on some systems only this fails


def _not_to_be_had(host: str, port: int, error: Exception) -> Finding:
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        text = f"port {port} of {host} is taken by {owner_of(port) or 'another program'}"
        advice = f"Metrics will be served on any free port, and a warning names it. To choose another, set {_PORT}."
        return warning(SUBJECT, text, advice)
    if number in {errno.EACCES, errno.EPERM}:
        return warning(
            SUBJECT, f"this user is not allowed to listen on port {port}", f"Set {_PORT} to a port above 1023."
        )
    advice = "instrument() raises ConfigError for it. Set OTEL_EXPORTER_PROMETHEUS_HOST to an address of this machine."
    return failed(SUBJECT, f"cannot listen on {host}: {error}", advice)
