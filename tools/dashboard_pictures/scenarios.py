"""Trainings for the pictures, scraped by a real Prometheus; each scenario is one of its jobs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from support.commands import environment
from support.otlp_http_receiver import Answer, receiver
from support.prometheus_server import Prometheus, prometheus_server, until

SCRAPE_S = 1
_ENDS_WITHIN_S = 60
_CONFIG = f"""
global: {{scrape_interval: {SCRAPE_S}s}}
scrape_configs:
"""
_JOB = """
  - job_name: {name}
    file_sd_configs: [{{files: ["{folder}/*.json"], refresh_interval: 1s}}]
"""
_LOGGED = {"Samples per second", "Loss", "Tokens per second", "Logged values", "Loss by rank"}


class Run(NamedTuple):
    """One run: its id, its number of ranks, and the arguments of its training."""

    id: str
    ranks: int = 1
    words: tuple[str, ...] = ()


class Scenario(NamedTuple):
    """Runs on one dashboard, and the panels that may be empty."""

    name: str
    runs: tuple[Run, ...]
    may_be_empty: frozenset[str] = frozenset()


SCENARIOS = [
    Scenario("one", (Run("baseline"),)),
    Scenario("four-ranks", (Run("ddp-baseline", ranks=4, words=("slow",)),)),
    Scenario("four-runs", tuple(Run(f"sweep-lr-{rate}") for rate in ("0.1", "0.03", "0.01", "0.003"))),
    Scenario("numeric", (Run("7345126", words=("numeric",)),), frozenset({"Watched tensors"})),
    Scenario(
        "nothing-logged",
        (Run("silent", words=("silent", "numeric")),),
        frozenset(_LOGGED | {"Watched tensors"}),
    ),
    Scenario("nan", (Run("diverges", words=("nan",)),), frozenset({"Loss"})),
]


@contextmanager
def scraped(scenarios: Sequence[Scenario], folder: Path) -> Iterator[Prometheus]:
    """Start all trainings and a Prometheus, wait until it has scraped each rank, and stop them when the block ends."""
    config = _CONFIG + "".join(_JOB.format(name=one.name, folder=folder / one.name) for one in scenarios)
    with ExitStack() as ended:
        server = ended.enter_context(receiver())
        server.answers.append(Answer(503))  # so that there is an export error to draw
        prometheus = ended.enter_context(prometheus_server(config, folder))
        for scenario in scenarios:
            for run in scenario.runs:
                ended.enter_context(_training(folder / scenario.name, scenario.name, run, server.url))
        ranks = sum(run.ranks for scenario in scenarios for run in scenario.runs)
        until(lambda: prometheus.query("torch_steps_total > 0"), lambda found: len(found) == ranks)
        yield prometheus


@contextmanager
def _training(discovery: Path, job: str, run: Run, traces_url: str) -> Iterator[None]:
    folder = discovery / run.id
    folder.mkdir(parents=True)
    settings = {
        "OTEL_SERVICE_NAME": job,
        "OTEL_EXPORTER_OTLP_ENDPOINT": traces_url.removesuffix("/v1/traces"),
        "TORCHOTEL_RUN_ID": run.id,
        "TORCHOTEL_DISCOVERY_DIR": str(discovery),
        "TORCHOTEL_GRADIENT_NORMS": "true",
        "TORCHOTEL_DETAIL": "5",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(run.ranks),
    }
    program = Path(__file__).with_name("training.py")
    command = [sys.executable, str(program), str(folder), *run.words]
    started = [
        subprocess.Popen(command, env=environment(**settings, RANK=str(rank), LOCAL_RANK=str(rank)))
        for rank in range(run.ranks)
    ]
    try:
        yield
    finally:
        (folder / "end").touch()
        for process in started:
            try:
                process.wait(_ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
