"""Settings: declarations, validation and environment variables."""
