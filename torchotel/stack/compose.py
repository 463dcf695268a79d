"""The stack in containers: `deploy/compose.yaml`, run by Docker or Podman."""

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
"""As compose.yaml names it."""
_CONTAINER = re.compile(rf"{_PROJECT}[-_](?P<server>\w+?)[-_]\d+")
"""Docker writes hyphens."""
_LINES = 30
"""Of a log."""
_ANSWER_S = 30.0
_UP_S = 1800.0
"""For fetching images; podman-compose would wait for ever for a container that died at once."""


@dataclass(frozen=True)
class Engine:
    """What runs a compose file."""

    command: tuple[str, ...]
    reaches_loopback: bool
    """Whether a container in the host's network is on the loopback of this machine."""

    @property
    def program(self) -> str:
        """The one that knows of containers."""
        return self.command[0].removesuffix("-compose")


def find_engine() -> Engine:
    """Find what can run the compose file.

    Raises:
        StackError: Nothing can; it says why, of each.
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
    """Start what does not run."""
    files = ["compose.yaml"]
    files += [] if engine.reaches_loopback else ["compose.desktop.yaml"]
    files += ["compose.small.yaml"] if small else []
    _compose(engine, variables(ports, targets), files, "up", "--detach")


def down(engine: Engine, ports: Ports, targets: str) -> None:
    """Stop all and keep the data."""
    _compose(engine, variables(ports, targets), ["compose.yaml"], "down")


def running(engine: Engine) -> set[str]:
    """Name the servers whose containers run."""
    # By the filter: what Podman shows as a state is not what Docker shows.
    return set(_containers(engine, "--filter", "status=running"))


def last_words(engine: Engine, server: Server) -> str | None:
    """Give the end of the log of a server whose container does not run."""
    if server.name in running(engine):
        return None
    name = _containers(engine, "--all").get(server.name)
    if name is None:
        return ""
    said = _ask(engine.program, "logs", "--tail", str(_LINES), name)
    return said.stdout + said.stderr


def variables(ports: Ports, targets: str) -> dict[str, str]:
    """Say to the compose file what it is to take from this machine."""
    return {
        **ports.variables(),
        "STACK_FILES": str(_write(ports)),
        "TORCHOTEL_DISCOVERY_DIR": targets,
        "GRAFANA_PASSWORD": paths.grafana_password(),
    }


def _compose(engine: Engine, variables: Mapping[str, str], files: list[str], *words: str) -> None:
    folder = paths.shipped()
    command = [*engine.command, *(word for file in files for word in ("-f", str(folder / file))), *words]
    environ = {**os.environ, **variables, "COMPOSE_PROJECT_NAME": _PROJECT}
    try:
        done = subprocess.run(command, env=environ, timeout=_UP_S, check=False)  # noqa: S603 - found above
    except subprocess.TimeoutExpired as error:
        raise StackError(f"{' '.join(command)} did not finish within {_UP_S:g} s") from error
    if done.returncode:
        raise StackError(f"{' '.join(command)} failed with exit code {done.returncode}; see its output above")


def _write(ports: Ports) -> Path:
    """Write what names ports, and give the folder, laid out as `deploy/`."""
    folder = paths.state() / "containers"
    texts = {
        "prometheus/collector.json": paths.collector_targets(ports, small=False),  # compose.small.yaml has its own
        "jaeger/ui.json": paths.jaeger_page(ports.grafana),
    }
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
        (folder / path).chmod(0o644)  # servers in containers are other users
    return folder


def _containers(engine: Engine, *which: str) -> dict[str, str]:
    """Give the containers of the stack by their servers."""
    of_ours = ("--filter", f"label=com.docker.compose.project={_PROJECT}", *which)
    listed = _ask(engine.program, "ps", *of_ours, "--format", "{{.Names}}").stdout
    return {found["server"]: found[0] for found in _CONTAINER.finditer(listed)}


def _docker(missing: list[str]) -> Engine | None:
    if shutil.which("docker") is None:
        missing.append("docker: not installed")
        return None
    about = _ask("docker", "info", "--format", "{{.OperatingSystem}} {{.SecurityOptions}}")
    if about.returncode:
        missing.append(f"docker: its daemon does not answer ({_last_line(about)})")
        return None
    if _ask("docker", "compose", "version").returncode:
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
    about = _ask("podman", "info")
    if about.returncode:
        missing.append(f"podman: podman info failed ({_last_line(about)})")
        return None
    return Engine(("podman-compose",), sys.platform == "linux")


def _ask(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=_ANSWER_S, check=False)  # noqa: S603 - above
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 1, "", f"no answer in {_ANSWER_S:g} s")
    except OSError as error:  # it is gone
        return subprocess.CompletedProcess(words, 1, "", str(error))


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {done.returncode}"
