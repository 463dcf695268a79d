"""What Grafana makes of the committed dashboards: panels, their queries, and variables filled in."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana"
FILES = sorted((FOLDER / "dashboards").glob("*.json"))
GPU_PANELS = {"GPU memory", "GPU time by layer", "GPU memory by rank"}
"""Panels that are empty where there is no device."""
GLOBALS = {"__rate_interval": "15s", "__range": "60s", "__interval": "1s"}
VARIABLE = re.compile(r"\$\{?(\w+)\}?")
SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{([^}]*)\}")


class Target(NamedTuple):
    """A query of a panel."""

    dashboard: str
    panel: str
    query: Mapping[str, Any]

    @property
    def expr(self) -> str:
        return str(self.query["expr"])

    @property
    def where(self) -> str:
        return f"{self.dashboard}: {self.panel}: {self.query['refId']}"


def dashboard(path: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return made


def panels(made: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Give the panels without the rows that part them; a collapsed row contains its panels."""
    for panel in made["panels"]:
        yield from panel["panels"] if panel["type"] == "row" else [panel]


def targets() -> list[Target]:
    """Give every query of every panel of every dashboard."""
    return [
        Target(made["title"], panel["title"], query)
        for made in map(dashboard, FILES)
        for panel in panels(made)
        for query in panel["targets"]
    ]


def filled(text: str, **chosen: str) -> str:
    """Put values in the place of variables, as Grafana does: `.+` where all are chosen."""
    values = {"job": ".+", "run": ".+", "rank": ".+", "module": ".+", **GLOBALS, **chosen}
    return VARIABLE.sub(lambda found: values[found[1]], text)
