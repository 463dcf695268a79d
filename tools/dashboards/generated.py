"""All generated files, by their names under `deploy/grafana/`."""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from tools.dashboards.alerts import alerts
from tools.dashboards.layers import layers
from tools.dashboards.ranks import ranks
from tools.dashboards.telemetry_health import telemetry_health
from tools.dashboards.training_run import training_run

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana"


def generated() -> dict[str, str]:
    """Return the text of every file."""
    drawn = {f"dashboards/{made.uid}.json": _json(made) for made in dashboards()}
    return {**drawn, "provisioning/alerting/torchotel.yaml": alerts()}


def dashboards() -> list[Dashboard]:
    """Make all dashboards."""
    return [training_run(), layers(), ranks(), telemetry_health()]


def _json(made: Dashboard) -> str:
    return json.dumps(made, cls=JSONEncoder, indent=2, ensure_ascii=False) + "\n"
