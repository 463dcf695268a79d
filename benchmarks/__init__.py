"""What torchotel costs, measured: `make bench`."""
