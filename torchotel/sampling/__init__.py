"""Sampling: which steps are recorded in detail, and which traces are kept."""
