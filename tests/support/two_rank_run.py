"""A run of two ranks that a real Prometheus scrapes, with the alerts' rules as they are shipped."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from support import PROGRAMS
from support.commands import environment
from support.otlp_http_receiver import Answer, Receiver, receiver
from support.prometheus_server import Prometheus, prometheus_server, until

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules" / "torchotel.yaml"
JOB, RUN = "digits", "run-1"
CONFIG = """
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: ["%s"]
scrape_configs:
  - job_name: %s
    file_sd_configs: [{files: ["%s/*.json"], refresh_interval: 1s}]
"""


class Trained(NamedTuple):
    """Two ranks in mid-run, and who watches them."""

    prometheus: Prometheus
    received: Receiver
    ranks: list[subprocess.Popen[bytes]]
    folder: Path

    def end(self, rank: int, how: str) -> None:
        """Let a rank end, `normally` or by `raise`."""
        (self.folder / f"end-{rank}").write_text(how)
        self.ranks[rank].wait()


def alerts() -> dict[str, dict[str, Any]]:
    """Return the alerting rules that are shipped, by name."""
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    return {rule["alert"]: rule for rule in rules if "alert" in rule}


@contextmanager
def trained(folder: Path) -> Iterator[Trained]:
    """Train, the first answer of the endpoint being an error, until each rank has enough to look back at."""
    with receiver() as server, prometheus_server(CONFIG % (RULES, JOB, folder / "targets"), folder) as prometheus:
        server.answers.append(Answer(503))
        ranks = [_rank(rank, folder, server) for rank in range(2)]
        try:
            until(lambda: prometheus.query("torch_steps_total > 30"), lambda found: len(found) == len(ranks))
            yield Trained(prometheus, server, ranks, folder)
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _rank(rank: int, folder: Path, server: Receiver) -> subprocess.Popen[bytes]:
    settings = {
        "OTEL_SERVICE_NAME": JOB,
        "OTEL_EXPORTER_OTLP_ENDPOINT": server.url.removesuffix("/v1/traces"),
        "TORCHOTEL_RUN_ID": RUN,
        "TORCHOTEL_DISCOVERY_DIR": str(folder / "targets"),
        "TORCHOTEL_GRADIENT_NORMS": "true",
        "TORCHOTEL_DETAIL": "2",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
    }
    program = PROGRAMS / "rank_program.py"
    command = [sys.executable, str(program), str(folder / f"end-{rank}"), str(folder / "store")]
    return subprocess.Popen(command, env=environment(**settings))
