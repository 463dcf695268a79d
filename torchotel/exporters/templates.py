"""Keep what an encoder made of a template, so that it is made once."""

from collections.abc import Callable
from typing import TypeVar

from torchotel.tracing.span import SpanTemplate

MAX_TEMPLATES = 20_000
"""Templates that are kept; a model with ever new shapes would otherwise keep them all."""

Encoding = TypeVar("Encoding")


class TemplateCache(dict[SpanTemplate, Encoding]):
    """Map a template to its encoding; an unknown one is encoded when it is asked for.

    The template itself is the key: it is compared by identity, and stays alive while it is here, so that
    no other template can take its place in memory.
    """

    def __init__(self, encode: Callable[[SpanTemplate], Encoding], limit: int = MAX_TEMPLATES) -> None:
        super().__init__()
        self._encode = encode
        self._limit = limit

    def __missing__(self, template: SpanTemplate) -> Encoding:
        if len(self) >= self._limit:
            # All at once: what is in use comes back with the next step, and no order of use has to be kept.
            self.clear()
        encoding = self[template] = self._encode(template)
        return encoding
