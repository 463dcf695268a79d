"""Stands in for Docker and Podman, which a test can't count on: it says that it works, and answers at the ports."""

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

ANSWERING = ("JAEGER_PORT", "PROMETHEUS_PORT", "COLLECTOR_HEALTH_PORT", "GRAFANA_PORT")


class _Fine(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


class Engine:
    """Programs in a folder for PATH.

    Args:
        folder: For them, and for what they were told.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def install(self, *names: str, system: str = "Linux") -> None:
        """Make `docker`, or `podman` and `podman-compose`, that say they are on a system."""
        for name in names:
            program = self.folder / name
            program.write_text(f"#!/bin/sh\nexec {sys.executable} {__file__} {self.folder} '{system}' {name} \"$@\"\n")
            program.chmod(0o755)

    def told(self) -> list[str]:
        """Give what `compose` was told, by whose name it was called."""
        return (self.folder / "told").read_text().splitlines()


def _main(folder: Path, system: str, name: str, *words: str) -> None:
    if words[-1] not in {"--detach", "down"}:
        sys.stdout.write(system)
        return
    with (folder / "told").open("a") as told:
        print(name, "up" if "up" in words else "down", os.environ["STACK_FILES"], file=told)
    serving = folder / "pid"
    if "up" not in words:
        os.kill(int(serving.read_text()), signal.SIGTERM)
        serving.unlink()
    elif not serving.exists():
        ports = json.dumps([int(os.environ[one]) for one in ANSWERING])
        words = (sys.executable, __file__, "serve", ports)
        nothing = subprocess.DEVNULL
        started = subprocess.Popen(words, stdout=nothing, stderr=nothing, start_new_session=True)
        serving.write_text(str(started.pid))


def _serve(ports: list[int]) -> None:
    for port in ports:
        server = ThreadingHTTPServer(("127.0.0.1", port), _Fine)
        Thread(target=server.serve_forever).start()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(json.loads(sys.argv[2]))
    else:
        _main(Path(sys.argv[1]), *sys.argv[2:])
