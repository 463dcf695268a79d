"""What was brought up, as `down`, `status` and a second `up` find it, from whichever terminal."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from torchotel.stack import places
from torchotel.stack.containers import Engine
from torchotel.stack.servers import Ports, Server, servers


@dataclass(frozen=True)
class Kind:
    """Which stack it is."""

    native: bool = False
    small: bool = False

    @property
    def command(self) -> str:
        """What brings it up."""
        return f"torchotel stack up{' --native' if self.native else ''}{' --small' if self.small else ''}"

    def __str__(self) -> str:
        words = "as plain processes" if self.native else "in containers"
        return f"{words}, without the Collector" if self.small else words


@dataclass(frozen=True)
class Stack:
    """A stack, where it listens and what runs it."""

    kind: Kind
    ports: Ports
    engine: Engine | None
    """None for plain processes."""
    targets: str
    """The folder in which ranks name their endpoints to it."""

    @property
    def servers(self) -> list[Server]:
        """Its servers, in the order of their start."""
        return servers(self.ports, small=self.kind.small, native=self.kind.native)

    def keep(self) -> None:
        """Remember it: neither its ports nor its engine can be found out later."""
        _file().write_text(json.dumps(asdict(self)))


def kept() -> Stack | None:
    """Give the stack that was brought up; None where none was."""
    if not _file().exists():
        return None
    read = json.loads(_file().read_text())
    engine = read["engine"] and Engine(tuple(read["engine"]["command"]), read["engine"]["reaches_loopback"])
    return Stack(Kind(**read["kind"]), Ports(**read["ports"]), engine, read["targets"])


def forget() -> None:
    """Say that no stack is up."""
    _file().unlink(missing_ok=True)


def _file() -> Path:
    return places.state() / "up.json"
