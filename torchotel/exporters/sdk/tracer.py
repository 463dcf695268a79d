"""Our tracer of a provider, and ids that leave the program's random numbers alone."""

import logging

from opentelemetry.sdk.trace import Tracer as SdkTracer
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import NoOpTracer, Tracer, TracerProvider

from torchotel import _names
from torchotel.tracing.ids import own_random

_logger = logging.getLogger("torchotel")


class OwnRandomIds(RandomIdGenerator):
    """Draw ids as the SDK does, but not from the global generator.

    Programs seed that one, and Dynamo sets it back after each compilation, so that ids would come twice.
    """

    def generate_span_id(self) -> int:
        """Return 64 random bits; all zeros is none."""
        return own_random.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        """Return 128 random bits; all zeros is none."""
        return own_random.getrandbits(128) or 1


def get_tracer(provider: TracerProvider, version: str) -> Tracer:
    """Return our tracer; only ours draws apart, and an id generator of the user's is kept."""
    try:
        tracer = provider.get_tracer(_names.SCOPE, version, schema_url=_names.SCHEMA_URL)
    except Exception:  # of the user's, and their program must start
        _logger.exception("The tracer provider has no tracer for us, so no spans are recorded")
        return NoOpTracer()
    if isinstance(tracer, SdkTracer) and type(tracer.id_generator) is RandomIdGenerator:
        tracer.id_generator = OwnRandomIds()
    return tracer
