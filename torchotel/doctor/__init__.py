"""Check what telemetry depends on: each module checks one subject and yields findings."""
