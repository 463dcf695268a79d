"""Whether anybody is at an address, and who."""

import errno
import socket

from torchotel._receiver import Address
from torchotel.doctor.network import connect, resolve, speaks_http, speaks_http2, speaks_tls
from torchotel.doctor.trouble import Trouble

_START = "Start a Collector or Jaeger there, or set another endpoint: --endpoint or OTEL_EXPORTER_OTLP_ENDPOINT."
_BLOCKED = "A firewall drops the packets, or the address is wrong: check that this machine can reach it."


def reach(address: Address, limit_s: float) -> None:
    """Resolve the name and open a connection.

    Raises:
        Trouble: There is no such name, or nobody who takes a connection.
    """
    try:
        found = resolve(address, limit_s)
    except TimeoutError:
        raise Trouble(
            f"the resolver did not answer for {address.host} within {limit_s:g} s", "Check DNS on this machine."
        ) from None
    except (OSError, UnicodeError) as error:  # a name that is none can't even be encoded
        advice = "Check the spelling and DNS. The name of a service in a cluster resolves only inside the cluster."
        raise Trouble(f"the host name {address.host} cannot be resolved ({_words(error)})", advice) from None
    try:
        connect(address, limit_s).close()
    except TimeoutError:
        raise Trouble(f"{address} did not answer within {limit_s:g} s", _BLOCKED) from None
    except ConnectionRefusedError:
        at = "" if found == [address.host] else f" ({', '.join(found)})"
        raise Trouble(f"nothing listens at {address}{at}: the connection was refused", _START) from None
    except OSError as error:
        reason = errno.errorcode.get(error.errno or 0, type(error).__name__)
        raise Trouble(f"{address} cannot be reached: {_words(error)} ({reason})", _BLOCKED) from None


def who_is_there(address: Address, limit_s: float) -> str:
    """Say what a server speaks that did not answer as it should: "gRPC", "HTTP", "TLS", or "" for none of them."""
    if speaks_http2(address, limit_s):
        return "gRPC"
    # Before HTTP: a server with TLS may answer plain HTTP with a complaint in plain HTTP.
    if not address.tls and speaks_tls(address, limit_s):
        return "TLS"
    return "HTTP" if speaks_http(address, limit_s) else ""


def _words(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return error.args[1] if len(error.args) > 1 else str(error)
    return getattr(error, "strerror", None) or str(error)
