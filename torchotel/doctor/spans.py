"""Whose spans are recorded: torchotel's, and those that the program makes itself."""

from collections.abc import Iterator

from torchotel._config import Config
from torchotel.doctor.finding import Finding, ok
from torchotel.exporters.sdk.providers import find_provider

SUBJECT = "spans"


def check(config: Config) -> Iterator[Finding]:
    """Look for a global TracerProvider, and say what it means."""
    provider = find_provider(None)
    if provider is not None:
        text = f"a TracerProvider is set globally ({type(provider).__module__}.{type(provider).__qualname__})"
        advice = "Spans of torchotel go through it: its sampler, limits, processors and endpoint apply."
        yield ok(SUBJECT, text, advice)
    elif config.set_global_provider:
        yield ok(SUBJECT, "set_global_provider: spans of the program are recorded and sent to the same endpoint")
    else:
        text = "spans of torchotel are recorded; spans of the program are not, unless it sets a TracerProvider"
        advice = "set_global_provider=True (TORCHOTEL_SET_GLOBAL_PROVIDER=true) sets one with the same endpoint."
        yield ok(SUBJECT, text, advice)
