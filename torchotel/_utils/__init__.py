"""Utilities that know neither torch nor OpenTelemetry."""
