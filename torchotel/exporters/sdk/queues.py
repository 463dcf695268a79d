"""How many spans a provider's processors can hold: the one place that looks at private parts of the SDK."""

from collections.abc import Iterator, Sized

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import TracerProvider

UNKNOWN_ROOM = 512
"""Room that is assumed in a processor that can't be looked into; the SDK's own queue is 2,048 long."""
MOST_ROOM = 8192
"""Where nothing queues there is no limit, but spans are counted when they are flushed."""


def slice_spans(provider: TracerProvider) -> int:
    """Return how many spans may be ended before the next flush.

    Half of what the fullest queue has room for: the rest is for the spans that the program ends meanwhile, since a
    full queue of the SDK's throws its oldest spans away.
    """
    active = getattr(provider, "_active_span_processor", None)
    return max(1, min((_room(processor) for processor in _flat(active)), default=MOST_ROOM) // 2)


def _flat(processor: object) -> Iterator[object]:
    """Yield the processors behind those that only pass on."""
    inner = getattr(processor, "_span_processors", None)
    if not isinstance(inner, tuple | list):
        yield processor
        return
    for one in inner:
        yield from _flat(one)


def _room(processor: object) -> int:
    if isinstance(processor, SimpleSpanProcessor):
        return MOST_ROOM
    batch = getattr(processor, "_batch_processor", processor)
    size, queue = getattr(batch, "_max_queue_size", None), getattr(batch, "_queue", None)
    if not isinstance(size, int) or not isinstance(queue, Sized):
        return UNKNOWN_ROOM
    return min(MOST_ROOM, size - len(queue))
