"""From PyTorch's hooks to what plain records are made of; nothing here knows OpenTelemetry."""
