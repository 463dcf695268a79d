"""Metrics as Prometheus reads them: on a port of ours, or in a registry of the user's."""
