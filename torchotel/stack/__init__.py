"""The stack that shows a run: Collector, Jaeger, Prometheus and Grafana, in containers or as plain processes."""
