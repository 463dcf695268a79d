"""Where finished spans go: an OTLP endpoint, a provider of the user's, a folder."""
