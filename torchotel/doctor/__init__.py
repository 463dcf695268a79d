"""Checks of what telemetry depends on: one subject a file, plain findings out."""
