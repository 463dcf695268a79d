"""Metrics: from records to numbers by instrument; knows nothing of torch."""
