"""Programs for development: none of them is installed."""
