"""Stand-ins for Docker and Podman, which may be missing: they report success, and listen on the ports."""

import json
import os
import select
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

ANSWERING = {
    "jaeger": "JAEGER_PORT",
    "prometheus": "PROMETHEUS_PORT",
    "collector": "COLLECTOR_HEALTH_PORT",
    "grafana": "GRAFANA_PORT",
}


class Fine(BaseHTTPRequestHandler):
    """Answer every request with success."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


class Engine:
    """Fake container programs in a folder for PATH.

    Args:
        folder: Folder of the programs and of their recorded calls.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def install(self, *names: str, system: str = "Linux") -> None:
        """Write fake `docker`, or `podman` and `podman-compose`, for an operating system."""
        for name in names:
            program = self.folder / name
            program.write_text(f"#!/bin/sh\nexec {sys.executable} {__file__} {self.folder} '{system}' {name} \"$@\"\n")
            program.chmod(0o755)

    def told(self) -> list[str]:
        """Return the arguments of the calls of `compose`, by program name."""
        return (self.folder / "told").read_text().splitlines()

    def let_up_fail(self) -> None:
        """Let `compose up` fail before it starts a container."""
        (self.folder / "fails").touch()

    def end_containers(self) -> None:
        """Stop the fake containers, in case the stack is still up."""
        _end(self.folder)


def _main(folder: Path, system: str, name: str, *words: str) -> None:
    if words[0] == "ps":
        project = (folder / "project").read_text() if (folder / "pid").exists() else None
        if f"label=com.docker.compose.project={project}" in words:
            sys.stdout.writelines(f"{project}-{one}-1\n" for one in ANSWERING)
        return
    if words[-1] not in {"--detach", "down"}:
        sys.stdout.write(system)
        return
    with (folder / "told").open("a") as told:
        print(
            name,
            "up" if "up" in words else "down",
            os.environ["STACK_FILES"],
            os.environ["TORCHOTEL_DISCOVERY_DIR"],
            file=told,
        )
    serving = folder / "pid"
    if (folder / "fails").exists() and "up" in words:
        sys.exit(1)
    if "up" not in words:
        _end(folder)
    elif not serving.exists():
        ports = json.dumps([int(os.environ[one]) for one in ANSWERING.values()])
        words = (sys.executable, __file__, "serve", ports)
        nothing = subprocess.DEVNULL
        started = subprocess.Popen(words, stdout=nothing, stderr=nothing, start_new_session=True)
        serving.write_text(str(started.pid))
        (folder / "project").write_text(os.environ.get("COMPOSE_PROJECT_NAME", "torchotel"))


def _end(folder: Path) -> None:
    process = os.pidfd_open(int((folder / "pid").read_text()))
    signal.pidfd_send_signal(process, signal.SIGTERM)
    select.select([process], [], [])  # waits until the process has ended
    os.close(process)
    (folder / "pid").unlink()


def _serve(ports: list[int]) -> None:
    for port in ports:
        server = ThreadingHTTPServer(("127.0.0.1", port), Fine)
        Thread(target=server.serve_forever).start()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(json.loads(sys.argv[2]))
    else:
        _main(Path(sys.argv[1]), *sys.argv[2:])
