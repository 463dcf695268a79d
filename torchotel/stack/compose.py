"""Run the stack in containers: `deploy/compose.yaml`, by Docker or Podman."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchotel.stack import paths
from torchotel.stack.services import Ports, Server, StackError

_PROJECT = "torchotel"
"""Name of the project in compose.yaml."""
_CONTAINER = re.compile(rf"{_PROJECT}[-_](?P<server>\w+?)[-_]\d+")
"""Container names: Docker separates with hyphens, podman-compose with underscores."""
_LINES = 30
"""Lines of a log that an error message shows."""
_ANSWER_S = 30.0
_UP_S = 1800.0
"""Seconds, which include pulling images. podman-compose would wait for ever for a container that has exited."""


@dataclass(frozen=True)
class Engine:
    """A container engine with a command for compose files."""

    command: tuple[str, ...]
    reaches_loopback: bool
    """Whether a container in the host's network can connect to 127.0.0.1 of this machine."""

    @property
    def program(self) -> str:
        """The program that lists containers: docker or podman."""
        return self.command[0].removesuffix("-compose")


def find_engine() -> Engine:
    """Return the container engine: Docker, else Podman.

    Raises:
        StackError: Neither is available; the message gives the reason for each.
    """
    missing: list[str] = []
    engine = _docker(missing) or _podman(missing)
    if engine is None:
        reasons = "\n".join(f"  {reason}" for reason in missing)
        raise StackError(
            f"no container engine is available, so nothing was started:\n{reasons}\n"
            "Install Docker (https://docs.docker.com/engine/install) or podman-compose.\n"
            "Without containers: torchotel stack up --native"
        )
    return engine


def up(engine: Engine, ports: Ports, targets: str, *, small: bool) -> None:
    """Start the containers that are not running."""
    files = ["compose.yaml"]
    files += [] if engine.reaches_loopback else ["compose.desktop.yaml"]
    files += ["compose.small.yaml"] if small else []
    _compose(engine, variables(ports, targets), files, "up", "--detach")


def down(engine: Engine, ports: Ports, targets: str) -> None:
    """Stop all containers; data volumes are kept."""
    _compose(engine, variables(ports, targets), ["compose.yaml"], "down")


def exists(engine: Engine) -> bool:
    """Return whether there is any container of the stack, also a stopped one."""
    return bool(_containers(engine, "--all"))


def running(engine: Engine) -> set[str]:
    """Return the names of the servers with a running container."""
    # The filter, since the states that `ps` prints differ between Podman and Docker.
    return set(_containers(engine, "--filter", "status=running"))


def log_tail(engine: Engine, server: Server) -> str | None:
    """Return the end of the log of a server's stopped container; None if the container is running."""
    if server.name in running(engine):
        return None
    name = _containers(engine, "--all").get(server.name)
    if name is None:
        return ""
    log = _run(engine.program, "logs", "--tail", str(_LINES), name)
    return log.stdout + log.stderr


def variables(ports: Ports, targets: str) -> dict[str, str]:
    """Return the variables that the compose files read."""
    return {
        **ports.variables(),
        "STACK_FILES": str(_write_files(ports)),
        "TORCHOTEL_DISCOVERY_DIR": targets,
        "GRAFANA_PASSWORD": paths.grafana_password(),
    }


def _compose(engine: Engine, variables: Mapping[str, str], files: list[str], *words: str) -> None:
    folder = paths.shipped()
    command = [*engine.command, *(word for file in files for word in ("-f", str(folder / file))), *words]
    environ = {**os.environ, **variables, "COMPOSE_PROJECT_NAME": _PROJECT}
    try:
        done = subprocess.run(command, env=environ, timeout=_UP_S, check=False)  # noqa: S603 - the engine that was found
    except subprocess.TimeoutExpired as error:
        raise StackError(f"{' '.join(command)} did not finish within {_UP_S:g} s") from error
    if done.returncode:
        raise StackError(f"{' '.join(command)} failed with exit code {done.returncode}; see its output above")


def _write_files(ports: Ports) -> Path:
    """Write the files that contain ports, in folders as in `deploy/`; return the top folder."""
    folder = paths.state() / "containers"
    texts = {
        "prometheus/collector.json": paths.collector_targets(ports, small=False),  # compose.small.yaml has its own
        "jaeger/ui.json": paths.jaeger_ui_config(ports.grafana),
    }
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
        (folder / path).chmod(0o644)  # the servers in containers run as other users
    return folder


def _containers(engine: Engine, *which: str) -> dict[str, str]:
    """Return the names of the stack's containers by server."""
    of_ours = ("--filter", f"label=com.docker.compose.project={_PROJECT}", *which)
    listed = _run(engine.program, "ps", *of_ours, "--format", "{{.Names}}").stdout
    return {found["server"]: found[0] for found in _CONTAINER.finditer(listed)}


def _docker(missing: list[str]) -> Engine | None:
    if shutil.which("docker") is None:
        missing.append("docker: not installed")
        return None
    about = _run("docker", "info", "--format", "{{.OperatingSystem}} {{.SecurityOptions}}")
    if about.returncode:
        missing.append(f"docker: its daemon does not answer ({_last_line(about)})")
        return None
    if _run("docker", "compose", "version").returncode:
        missing.append("docker: Compose is not installed (https://docs.docker.com/compose/install)")
        return None
    apart = "Docker Desktop" in about.stdout or "name=rootless" in about.stdout
    return Engine(("docker", "compose"), sys.platform == "linux" and not apart)


def _podman(missing: list[str]) -> Engine | None:
    if shutil.which("podman") is None:
        missing.append("podman: not installed")
        return None
    if shutil.which("podman-compose") is None:
        missing.append("podman: podman-compose is not installed (pip install podman-compose)")
        return None
    about = _run("podman", "info")
    if about.returncode:
        missing.append(f"podman: podman info failed ({_last_line(about)})")
        return None
    return Engine(("podman-compose",), sys.platform == "linux")


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=_ANSWER_S, check=False)  # noqa: S603 - fixed commands
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 1, "", f"no answer in {_ANSWER_S:g} s")
    except OSError as error:  # the program was removed meanwhile
        return subprocess.CompletedProcess(words, 1, "", str(error))


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {done.returncode}"
