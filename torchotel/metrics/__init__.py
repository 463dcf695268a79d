"""Metrics: aggregate records by instrument, without torch."""
