"""Tracing: from records to spans; knows nothing of torch."""
