"""From PyTorch's hooks to plain records; nothing here knows OpenTelemetry."""
