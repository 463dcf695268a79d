"""What is beyond OpenTelemetry's limits is left out and counted; all else stays as it is."""

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from support.otlp_traces import CONV, RESOURCE, STEP, T0, flat, rich

from torchotel._records import Error
from torchotel._utils.gil import GilYielder
from torchotel.exporters.otlp.encoder import Envelope, SpanEncoder
from torchotel.exporters.sanitize import DEFAULT_LIMITS, Limiter, SpanLimits
from torchotel.tracing.span import Attributes, Span, SpanEvent, SpanLink, Trace


def sent(trace: Trace, limits: SpanLimits) -> list[ProtoSpan]:
    """Give the spans as a receiver reads them."""
    body = Envelope(RESOURCE, "1.2").wrap([SpanEncoder().encode(Limiter(limits, GilYielder()).apply(trace))])
    return list(TracesData.FromString(body).resource_spans[0].scope_spans[0].spans)


def keys(span: ProtoSpan) -> list[str]:
    return [pair.key for pair in span.attributes]


def test_what_is_within_limits_stays_as_it_is() -> None:
    """By default no span of ours comes near them, and the bytes are the same; most traces are not even made anew."""
    for trace in (rich(), flat(100)):
        assert SpanEncoder().encode(Limiter(DEFAULT_LIMITS, GilYielder()).apply(trace)) == SpanEncoder().encode(trace)
    plain = Trace(1, [Span(STEP, 1, 0, T0, T0 + 9, {"a": 1})], {"torch.step.number": 3})
    assert Limiter(DEFAULT_LIMITS, GilYielder()).apply(plain) is plain


@pytest.mark.parametrize("limit", [0, 1, 3, 8, 9, 10, 128])
def test_counts_attributes(limit: int) -> None:
    """A span has at most so many: those of its trace, then those of all its kind, then its own, the error's last."""
    own: Attributes = {"a": 1, "b": 2.5, "nan": float("nan")}
    spans = [Span(STEP, 1, 0, T0, T0 + 9), Span(CONV, 2, 1, T0, T0 + 1, own, Error("E", "m"))]
    _, span = sent(Trace(1, spans, {"torch.step.number": 3}), SpanLimits(attributes=limit))
    whole = ["torch.step.number", *CONV.attributes, "a", "b", "error.type"]
    assert sorted(keys(span)) == sorted(whole[:limit])
    assert span.dropped_attributes_count == max(0, len(whole) - limit)
    assert span.status.message == "m"


def test_counts_events_and_links() -> None:
    """So many events and links stay, the exception's event among them where there is room, with so many attributes."""
    events = tuple(SpanEvent(f"e{i}", T0, {"a": 1, "b": 2}) for i in range(3))
    links = tuple(SpanLink(1, 2, {"a": 1, "b": 2}) for _ in range(4))
    trace = Trace(1, [Span(STEP, 1, 0, T0, T0 + 9, None, Error("E", "m"), events, links)], {})
    (span,) = sent(trace, SpanLimits(events=2, links=1, event_attributes=1, link_attributes=0))
    assert [event.name for event in span.events] == ["e0", "e1"]
    assert (span.dropped_events_count, span.dropped_links_count) == (2, 3)
    assert [(len(event.attributes), event.dropped_attributes_count) for event in span.events] == [(1, 1)] * 2
    assert [(len(link.attributes), link.dropped_attributes_count) for link in span.links] == [(0, 2)]
    (span,) = sent(trace, SpanLimits(events=4))
    assert [event.name for event in span.events] == ["e0", "e1", "e2", "exception"]


def test_cuts_texts_of_events_and_links_at_their_own_length() -> None:
    """As in OpenTelemetry's SDK, the length that is set for spans says nothing of their events and links."""
    error, event, link = Error("E", "message"), SpanEvent("e", T0, {"a": "abcdef"}), SpanLink(1, 2, {"a": "abcdef"})
    trace = Trace(1, [Span(STEP, 1, 0, T0, T0 + 9, {"a": "abcdef"}, error, (event,), (link,))], {})
    for limits, expected in (
        (SpanLimits(value_length=3), ("abc", "abcdef", "message", "abcdef")),
        (SpanLimits(event_value_length=2), ("abcdef", "ab", "me", "ab")),
    ):
        (span,) = sent(trace, limits)
        texts = {pair.key: pair.value.string_value for pair in span.attributes}
        carried = [{pair.key: pair.value.string_value for pair in one.attributes} for one in span.events]
        (linked,) = [pair.value.string_value for pair in span.links[0].attributes]
        assert (texts["a"], carried[0]["a"], carried[1]["exception.message"], linked) == expected


def test_cuts_texts() -> None:
    """Texts and each text of an array are cut; numbers and names of spans and attributes are not."""
    spans = [Span(STEP, 1, 0, T0, T0 + 9, {"own": "ñandú", "number": 123456}), Span(CONV, 2, 1, T0, T0 + 1)]
    root, call = sent(Trace(1, spans, {"of.trace": "abcdef"}), SpanLimits(value_length=3))
    read = {pair.key: pair.value for span in (root, call) for pair in span.attributes}
    assert (read["own"].string_value, read["of.trace"].string_value, read["number"].int_value) == ("ñan", "abc", 123456)
    assert [value.string_value for value in read["torch.input.shapes"].array_value.values] == ["8x3", "8"]
    assert call.name == CONV.name
    assert (root.dropped_attributes_count, call.dropped_attributes_count) == (0, 0)
