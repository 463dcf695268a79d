"""Exporters of traces and metrics: OTLP, Prometheus, OpenTelemetry providers, run file, console."""
