"""Whether the Prometheus of the stack that is up on this machine finds what is going to train."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from torchotel._config import Config
from torchotel._stack_folder import stack_folder, stack_targets
from torchotel.doctor.finding import Finding, ok, warning
from torchotel.stack.manager import Stack, stack_that_runs

SUBJECT = "stack"


def check(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Follow the ways of metrics to it; where no stack of this user's is up there is nothing to say."""
    if not _was_ever_up(environ) or (stack := stack_that_runs()) is None:
        return
    hindrance = None if _is_pushed(stack, config) else _of_scraping(stack, config, environ)
    if hindrance is None:
        yield ok(SUBJECT, f"up {stack.kind}; its Prometheus finds runs of this machine")
    else:
        text, advice = hindrance
        yield warning(SUBJECT, f"up {stack.kind}, but its Prometheus will not find a run: {text}", advice)


def _was_ever_up(environ: Mapping[str, str]) -> bool:
    try:
        return stack_folder(environ).is_dir()
    except RuntimeError:
        return False


def _is_pushed(stack: Stack, config: Config) -> bool:
    ports = stack.ports
    takers = {ports.prometheus} if stack.kind.small else {ports.prometheus, ports.otlp_http, ports.otlp_grpc}
    return "otlp" in config.metrics_exporter and urlsplit(config.metrics_endpoint).port in takers


def _of_scraping(stack: Stack, config: Config, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Say what is in the way, and what to do; None where nothing is."""
    if stack.engine is not None and not stack.engine.reaches_loopback:
        text = "no container reaches the loopback of this machine, and metrics are not pushed to it"
        return text, f"Run {stack.kind.command} again: it prints the variables to set."
    if "prometheus" not in config.metrics_exporter:
        text = f"metrics_exporter is {','.join(config.metrics_exporter) or 'none'}"
        return text, "Set OTEL_METRICS_EXPORTER to prometheus, or unset it."
    if config.prometheus_port is None:
        return "prometheus_port is none", "Set a port, or unset OTEL_EXPORTER_PROMETHEUS_PORT."
    named = config.discovery_dir or stack_targets(environ)
    if named is None or named.resolve() != Path(stack.targets).resolve():
        text = f"discovery_dir is {named}, but it reads {stack.targets}"
        return text, f"Run: export TORCHOTEL_DISCOVERY_DIR={shlex.quote(stack.targets)}"
    return None
