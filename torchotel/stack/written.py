"""Files in `deploy/` that name ports, as `up` writes them: their readers know no variables."""

from __future__ import annotations

import json

from torchotel.stack.places import shipped
from torchotel.stack.servers import Ports


def collector_targets(ports: Ports, *, small: bool) -> str:
    """Write `prometheus/collector.json`: what was pushed to the Collector, and its own metrics."""
    own = [f"127.0.0.1:{port}" for port in (ports.collector_metrics, ports.collector_telemetry)]
    return json.dumps([] if small else [{"targets": own}])


def jaeger_page(grafana: int) -> str:
    """Write `jaeger/ui.json`: its links lead to Grafana."""
    shown = (shipped() / "jaeger" / "ui.json").read_text()
    return shown.replace(f"//localhost:{Ports.grafana}/", f"//localhost:{grafana}/")
