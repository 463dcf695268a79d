"""Records training steps by PyTorch's hooks; imports torch and nothing of OpenTelemetry."""
