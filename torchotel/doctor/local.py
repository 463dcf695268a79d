"""Check this machine: the Prometheus port, the worker, the folders for files, and the local stack."""

import errno
import shlex
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from torchotel._limits import MAX_RUN_FILE_BYTES
from torchotel._utils.distributed import identify, own_port, rank_folder_name
from torchotel._utils.installation import stack_folder, stack_targets
from torchotel._utils.process import MAX_PORT, owner_of
from torchotel.config.config import Config
from torchotel.config.otlp_endpoint import address_of, is_loopback
from torchotel.doctor.result import Finding, failed, ok, warning
from torchotel.exporters.run_folder import METRICS_NAME
from torchotel.stack.manager import Stack, running_stack
from torchotel.worker.supervisor import needs_thread

_PROMETHEUS = "prometheus"
_PORT_VARIABLE = "OTEL_EXPORTER_PROMETHEUS_PORT"


def check_port(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Bind the port of this rank briefly."""
    if "prometheus" not in config.metrics_exporter or config.prometheus_port is None:
        yield ok(_PROMETHEUS, "no scrape endpoint is configured")
        return
    identity = identify(environ)
    host, port = config.prometheus_host, own_port(config.prometheus_port, identity.local_rank)
    if port == 0 and config.prometheus_port:
        yield warning(
            _PROMETHEUS,
            f"the port of this rank would be above {MAX_PORT}, so any free port is used",
            f"Lower {_PORT_VARIABLE}.",
        )
    try:
        _bind(host, port)
    except (OSError, UnicodeError) as error:
        yield _bind_failed(host, port, error)
    else:
        of_rank = f" of local rank {identity.local_rank}" if identity.world_size != 1 else ""
        yield ok(_PROMETHEUS, f"port {port}{of_rank} is free on {host}" if port else f"any free port of {host} is used")
    if not is_loopback(host):
        text = f"metrics are served on {host} to every client that can reach it"
        yield warning(
            _PROMETHEUS,
            text,
            "They hold names of modules and logged values. Set prometheus_host to 127.0.0.1 for this machine only.",
        )


def check_worker(config: Config) -> Iterator[Finding]:
    """Report where spans are built and exported."""
    reason = "worker=thread" if config.worker == "thread" else needs_thread(config)
    if reason is None:
        text = "a companion process builds and exports the spans; handle.stats() shows its pid, memory and lag"
        yield ok("worker", text)
    elif config.worker != "process":
        yield ok("worker", f"a thread of the training process builds and exports the spans: {reason}")
    else:
        advice = "Remove that setting, or set TORCHOTEL_WORKER=thread."
        yield warning("worker", f"worker=process is ignored: {reason}", advice)


FIXED_COST_MS = 0.12, 0.25
"""Cost of a step without detail, in a small and in a large model, as measured on the page about overhead."""


def check_overhead(config: Config) -> Iterator[Finding]:
    """Report what detail may cost, and the fixed cost of a step, which the budget does not cover."""
    if config.detail == "auto":
        detail = f"detail takes at most {100 * config.overhead_budget:g} % of step time"
    elif config.detail == "off":
        detail = "no step is detailed"
    else:
        which = "every step is" if config.detail in ("all", 1) else f"one step in {config.detail} is"
        detail = f"{which} detailed, and overhead_budget does not apply"
    least_ms, most_ms = FIXED_COST_MS
    share = f"{10 * least_ms:g} to {10 * most_ms:g} % of a step of 10 ms"
    yield ok("overhead", f"{detail}; each step has a fixed cost of {least_ms:g} to {most_ms:g} ms, which is {share}")


def _bind(host: str, port: int) -> None:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the scrape endpoint does
        probe.bind(address)
        probe.listen(1)  # some systems report a used port only here


def _bind_failed(host: str, port: int, error: Exception) -> Finding:
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        text = f"port {port} of {host} is taken by {owner_of(port) or 'another program'}"
        advice = (
            f"Metrics will be served on any free port, and a warning names it. To choose another, set {_PORT_VARIABLE}."
        )
        return warning(_PROMETHEUS, text, advice)
    if number in {errno.EACCES, errno.EPERM}:
        return warning(
            _PROMETHEUS,
            f"this user is not allowed to listen on port {port}",
            f"Set {_PORT_VARIABLE} to a port above 1023.",
        )
    advice = "instrument() raises ConfigError for it. Set prometheus_host to an address of this machine."
    return failed(_PROMETHEUS, f"cannot listen on {host}: {error}", advice)


_FOLDERS = "folders"
_MIB = 1024 * 1024
_MIN_BYTES = 16 * _MIB
_PROBE_BYTES = 4096


def check_folders(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Write a temporary file to each folder, and check the free space."""
    if config.record is None:
        yield ok(_FOLDERS, "no run file is configured (record); torchotel run writes one to torchotel-runs")
    else:
        yield _check_folder(config.record / rank_folder_name(identify(environ)), "record")
    if config.discovery_dir is not None:
        yield _check_folder(config.discovery_dir, "discovery_dir")


def _check_folder(folder: Path, setting: str) -> Finding:
    shown = f"{setting} {folder}"
    if setting == "record" and (folder / METRICS_NAME).exists():
        return ok(
            _FOLDERS, f"{shown} holds a run already; the next run is recorded beside it, and a warning names the folder"
        )
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing, prefix=".torchotel-doctor-") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
    except OSError as error:
        text = f"{shown} cannot be written to: {error.strerror}" + (f" ({existing})" if existing != folder else "")
        return failed(_FOLDERS, text, "Set a folder that this user can write to, on a disk with free space.")
    free_bytes = shutil.disk_usage(existing).free
    text = f"{shown} can be written to, {free_bytes / _MIB:,.0f} MiB are free"
    if setting != "record" or free_bytes >= MAX_RUN_FILE_BYTES:
        return ok(_FOLDERS, text)
    needs = f"A run file grows to {MAX_RUN_FILE_BYTES // _MIB} MiB at most. Recording stops if the disk is full."
    return (failed if free_bytes < _MIN_BYTES else warning)(_FOLDERS, text, needs)


_STACK = "stack"


def check_stack(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check whether metrics and traces reach the stack; no finding if no stack of this user is up."""
    if not _was_ever_up(environ) or (stack := running_stack()) is None:
        return
    problem = None if _is_pushed(stack, config) else _scrape_problem(stack, config, environ)
    if problem is None:
        yield ok(_STACK, f"up {stack.kind}; its Prometheus finds runs of this machine")
    else:
        text, advice = problem
        yield warning(_STACK, f"up {stack.kind}, but its Prometheus will not find a run: {text}", advice)
    if config.traces_exporter == "otlp":
        yield from _check_traces(stack, config)


def _check_traces(stack: Stack, config: Config) -> Iterator[Finding]:
    """Warn if the traces go to a port of this machine that is not the stack's; a remote server is left alone."""
    address, ports = address_of(config.traces_endpoint, insecure=True), stack.ports
    if address is None or not is_loopback(address.host) or address.port in {ports.otlp_grpc, ports.otlp_http}:
        return
    port = ports.otlp_grpc if config.protocol == "grpc" else ports.otlp_http
    advice = f"To send them to its Jaeger, run: export OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:{port}"
    yield warning(_STACK, f"up {stack.kind}, but traces go to {address}", advice)


def _was_ever_up(environ: Mapping[str, str]) -> bool:
    try:
        return stack_folder(environ).is_dir()
    except RuntimeError:
        return False


def _is_pushed(stack: Stack, config: Config) -> bool:
    ports = stack.ports
    receiving_ports = {ports.prometheus} if stack.kind.small else {ports.prometheus, ports.otlp_http, ports.otlp_grpc}
    return "otlp" in config.metrics_exporter and urlsplit(config.metrics_endpoint).port in receiving_ports


def _scrape_problem(stack: Stack, config: Config, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return why Prometheus will not scrape a run, with advice; None if it will."""
    if stack.engine is not None and not stack.engine.reaches_loopback:
        text = "no container reaches the loopback of this machine, and metrics are not pushed to it"
        return text, f"Run {stack.kind.command} again: it prints the variables to set."
    if "prometheus" not in config.metrics_exporter:
        text = f"metrics_exporter is {','.join(config.metrics_exporter) or 'none'}"
        return text, "Set OTEL_METRICS_EXPORTER to prometheus, or unset it."
    if config.prometheus_port is None:
        return "prometheus_port is none", "Set a port, or unset OTEL_EXPORTER_PROMETHEUS_PORT."
    folder = config.discovery_dir or stack_targets(environ)
    if folder is None or folder.resolve() != Path(stack.targets).resolve():
        text = f"discovery_dir is {folder}, but it reads {stack.targets}"
        return text, f"Run: export TORCHOTEL_DISCOVERY_DIR={shlex.quote(stack.targets)}"
    return None
