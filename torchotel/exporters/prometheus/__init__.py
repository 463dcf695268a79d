"""Metrics for Prometheus, on a scrape endpoint or in the program's registry."""
