"""Who can reach an address, and what a client calls this machine by."""

from __future__ import annotations

import ipaddress
import re

_PORT = re.compile(r":\d*$")
_PRIVATE = (".localhost", ".local", ".internal", ".home.arpa")
"""Ends of names that nobody can register."""


def names_this_machine(host: str) -> bool:
    """Tell whether a Host header could be that of a client which means this machine.

    A web page can let its own name lead to 127.0.0.1 once it is open (DNS rebinding), and its script then reads what
    is served there; but its requests carry that name, which is one that can be registered.
    """
    name = _PORT.sub("", host).strip("[]").rstrip(".").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(_PRIVATE)
    return True
