"""Benchmarks of the cost of torchotel: `make bench`."""
