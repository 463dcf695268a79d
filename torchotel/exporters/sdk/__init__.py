"""Replay through a TracerProvider of the user's: its sampler, limits and processors all apply."""
