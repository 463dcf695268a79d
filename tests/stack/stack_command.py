"""`torchotel stack` as it is called in a terminal."""

import subprocess
from pathlib import Path
from urllib.request import urlopen

import commands
from loopback import free_ports

from torchotel.stack.backends import cache
from torchotel.stack.servers import Ports


class Stack:
    """The command, with folders and ports of its own."""

    def __init__(self, folder: Path) -> None:
        names = Ports().variables()
        self.ports = dict(zip(names, map(str, free_ports(len(names))), strict=True))
        self.environ = {"XDG_STATE_HOME": str(folder), "TORCHOTEL_BACKENDS": str(cache()), **self.ports}
        self._folder = folder

    def __call__(self, *words: str, **environ: str) -> "subprocess.CompletedProcess[str]":
        return commands.torchotel("stack", *words, cwd=self._folder, **{**self.environ, **environ})

    def elsewhere(self, *words: str, **environ: str) -> "subprocess.CompletedProcess[str]":
        """Call it in a terminal that knows nothing of the ports."""
        return self(*words, **{**dict.fromkeys(self.ports, ""), **environ})

    def ask(self, server: str, path: str) -> str:
        with urlopen(f"http://localhost:{self.ports[f'{server}_PORT']}{path}", timeout=10) as answer:  # http
            return str(answer.read().decode())
