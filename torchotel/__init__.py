"""OpenTelemetry for PyTorch training: every module call a span, forward and backward."""
