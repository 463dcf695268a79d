"""The port that Prometheus scrapes: whether it is free, who has it, and who can reach it."""

import errno
import itertools
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from torchotel._config import Config
from torchotel._ranks import own_port
from torchotel._text import cut
from torchotel.doctor.finding import Finding, failed, ok, warning
from torchotel.exporters.prometheus.hosts import is_loopback

SUBJECT = "prometheus"
_PORT = "OTEL_EXPORTER_PROMETHEUS_PORT"
MOST_SHOWN = 100
"""Characters of another process's command."""
_LISTENS = "0A"
"""A socket's state in /proc/net/tcp."""
_ADDRESS, _STATE, _UID, _INODE = 1, 3, 7, 9
"""Columns there."""


def check(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Bind the port of this rank for a moment."""
    if "prometheus" not in config.metrics_exporter or config.prometheus_port is None:
        yield ok(SUBJECT, "no endpoint is asked for")
        return
    host, port = config.prometheus_host, own_port(config.prometheus_port, environ)
    if port == 0 and config.prometheus_port:
        yield warning(SUBJECT, "the port of this rank would be above 65535, so it is any free one", f"Lower {_PORT}.")
    try:
        _bind(host, port)
    except (OSError, UnicodeError) as error:
        yield _not_to_be_had(host, port, error)
    else:
        rank = environ.get("LOCAL_RANK", "")
        of_rank = f", which is that of local rank {rank}," if rank.isdecimal() else ""
        yield ok(SUBJECT, f"port {port}{of_rank} is free on {host}" if port else f"any free port of {host} will do")
    if not is_loopback(host):
        text = f"metrics are served on {host} to everybody who can reach it"
        yield warning(
            SUBJECT, text, "Names of modules and logged values are among them. 127.0.0.1 is this machine alone."
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
        text = f"port {port} of {host} is taken by {_owner(port) or 'another program'}"
        advice = f"Metrics will be on any free port, and a warning says on which. Choose another: {_PORT}."
        return warning(SUBJECT, text, advice)
    if number in {errno.EACCES, errno.EPERM}:
        return warning(SUBJECT, f"port {port} needs rights that this user has not", f"Choose one above 1023: {_PORT}.")
    advice = "instrument() raises ConfigError for it. Set OTEL_EXPORTER_PROMETHEUS_HOST to an address of this machine."
    return failed(SUBJECT, f"{host} cannot be listened on: {error}", advice)


def _owner(port: int) -> str | None:
    """Name the process that listens on a port, where /proc tells it."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for columns in map(str.split, Path("/proc/net", table).read_text().splitlines()[1:]):
                if columns[_STATE] == _LISTENS and int(columns[_ADDRESS].rpartition(":")[2], 16) == port:
                    return _process_with(f"socket:[{columns[_INODE]}]") or f"a process of user {columns[_UID]}"
    return None


def _process_with(file: str) -> str | None:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if any(str(opened.readlink()) == file for opened in (process / "fd").iterdir()):
                words = os.fsdecode((process / "cmdline").read_bytes()).split("\0")[:2]
                # Options, and what follows them, may be passwords.
                shown = itertools.takewhile(lambda word: not word.startswith("-"), words)
                return f"process {process.name} ({cut(' '.join(shown).strip(), MOST_SHOWN)})"
    return None
