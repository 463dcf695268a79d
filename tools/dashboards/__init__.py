"""The dashboards of Grafana as code: `python -m tools.dashboards` writes what is committed under `deploy/grafana/`."""
