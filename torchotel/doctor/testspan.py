"""A span that says no more than that it came, in the form in which all of ours leave."""

import secrets
import time
from typing import NamedTuple

from torchotel._config import Config
from torchotel.exporters.otlp.encode import Envelope, SpanEncoder
from torchotel.telemetry.resource import describe_process
from torchotel.telemetry.spans import Span, SpanTemplate, Trace

NAME = "torchotel.doctor"
_LASTS_NS = 1_000_000


class TestSpan(NamedTuple):
    """An encoded request with one span, and what it is found by."""

    trace_id: str
    service: str
    body: bytes


def make(config: Config, version: str) -> TestSpan:
    """Make a trace of one span, that ends now."""
    resource = describe_process(config.service_name, "torchotel-doctor", {})
    trace_id, now_ns = secrets.randbits(128), time.time_ns()
    template = SpanTemplate(NAME, {"torchotel.doctor": "sent by torchotel doctor to see whether spans arrive"})
    span = Span(template, secrets.randbits(63) + 1, 0, now_ns - _LASTS_NS, now_ns)
    spans = SpanEncoder().encode(Trace(trace_id, [span], {}))
    body = Envelope(resource, version).wrap([spans])
    return TestSpan(f"{trace_id:032x}", str(resource["service.name"]), body)
