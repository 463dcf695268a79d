"""Settings: what they may be, where they are read, and what they mean."""
