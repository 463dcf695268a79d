"""Run `torchotel stack` as in a terminal."""

import os
import shlex
import signal
import subprocess
from pathlib import Path
from urllib.request import urlopen

from support import commands
from support.ports import free_ports
from support.prometheus_server import until
from torchotel.stack.binaries import cache
from torchotel.stack.services import Ports


class Stack:
    """The command, with its own folders and ports."""

    def __init__(self, folder: Path) -> None:
        names = Ports().variables()
        self.ports = dict(zip(names, map(str, free_ports(len(names))), strict=True))
        self.environ = {"XDG_STATE_HOME": str(folder), "TORCHOTEL_BACKENDS": str(cache()), **self.ports}
        self._folder = folder

    def __call__(self, *words: str, **environ: str) -> "subprocess.CompletedProcess[str]":
        return commands.torchotel("stack", *words, cwd=self._folder, **{**self.environ, **environ})

    def elsewhere(self, *words: str, **environ: str) -> "subprocess.CompletedProcess[str]":
        """Run the command in a terminal without the ports' variables."""
        return self(*words, **{**dict.fromkeys(self.ports, ""), **environ})

    def kill(self, *names: str) -> None:
        """Kill servers of the stack, and wait until they have ended."""
        pids = {line.split()[0]: line.split()[-1] for line in self("status").stdout.splitlines()}
        for name in names:
            os.kill(int(pids[name]), signal.SIGKILL)
        until(lambda: self("status").stdout, lambda text: all(f"{name:10} down" in text for name in names))

    @staticmethod
    def variables(said: str) -> dict[str, str]:
        """Return the variables that the command's output exports."""
        words = [shlex.split(line) for line in said.splitlines() if line.startswith("  export ")]
        return {name: value for _, pair in words for name, _, value in [pair.partition("=")]}

    def ask(self, server: str, path: str) -> str:
        with urlopen(f"http://localhost:{self.ports[f'{server}_PORT']}{path}", timeout=10) as answer:  # http
            return str(answer.read().decode())
