"""Span ids, trace ids and the head sampling decision."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context

from torchotel import _semconv as names
from torchotel._records import Baggage, ModelInfo, SpanReference
from torchotel._utils.distributed import Identity
from torchotel.tracing.shared_trace import shared_digest
from torchotel.tracing.span import Attributes, AttributeValue, Span, SpanContextSource, SpanTemplate, Trace

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.sampling import Sampler


OTHER_FLAGS = 0xFE
"""The trace flags other than `sampled`."""
_RANDOM_TRACE_ID = 0x02
"""Of these, the flag of a random trace id, which children have from their parent.

https://www.w3.org/TR/trace-context-2/#trace-flags
"""

own_random = random.Random()  # noqa: S311  # the global generator belongs to the program, which may seed it
os.register_at_fork(after_in_child=own_random.seed)  # otherwise all children would have the same ids


def random_trace_id() -> int:
    """Return a random trace id, which must not be 0."""
    return own_random.getrandbits(128) or 1


def random_span_id() -> int:
    """Return a random span id whose low bits are 1, so that the spans of its trace can have the ids that follow."""
    return own_random.getrandbits(64) & ~0xFFFFFF | 1


def make_sampler(name: str, ratio: float) -> Sampler:
    """Make the sampler that OTEL_TRACES_SAMPLER names (https://opentelemetry.io/docs/specs/otel/trace/sdk/#sampling).

    Args:
        name: always_on, always_off, traceidratio, or one of these after `parentbased_`.
        ratio: Share of traces that traceidratio keeps.
    """
    from opentelemetry.sdk.trace.sampling import (  # noqa: PLC0415  # takes 30 ms, and the default sampler does not need it
        ALWAYS_OFF,
        ALWAYS_ON,
        ParentBased,
        TraceIdRatioBased,
    )

    roots = {"always_on": ALWAYS_ON, "always_off": ALWAYS_OFF, "traceidratio": TraceIdRatioBased(ratio)}
    root = roots[name.removeprefix("parentbased_")]
    return ParentBased(root) if name.startswith("parentbased_") else root


def context_of(reference: SpanReference, context: Context | None = None) -> Context:
    """Return a context, by default an empty one, in which the span of a reference is current."""
    return set_span_in_context(NonRecordingSpan(span_context_of(reference)), context or Context())


def span_context_of(reference: SpanReference) -> SpanContext:
    """Return the OpenTelemetry span context of a reference."""
    flags = TraceFlags(reference.other_flags | (TraceFlags.SAMPLED if reference.sampled else TraceFlags.DEFAULT))
    state = TraceState.from_header([reference.state]) if reference.state else None
    return SpanContext(reference.trace_id, reference.span_id, reference.remote, flags, state)


class IdGenerator(SpanContextSource):
    """Fix random span ids, and make the head sampling decision with the sampler of the settings.

    Args:
        sampler: The name of the sampler, see `make_sampler`; with always_off the tail sampler keeps nothing either.
        ratio: Share of traces that traceidratio keeps.
    """

    def __init__(self, sampler: str = "parentbased_always_on", ratio: float = 1.0) -> None:
        self._sampler = None if sampler == "parentbased_always_on" else make_sampler(sampler, ratio)
        self.keeps_late = not sampler.endswith("always_off")
        self.off = not self.keeps_late or (ratio == 0 and sampler.endswith("traceidratio"))

    def start(
        self,
        name: str,
        parent: SpanReference | None,
        start_ns: int,
        attributes: Attributes | None = None,
        baggage: Baggage | None = None,  # not exported
        trace_id: int | None = None,
    ) -> SpanReference:
        """Fix the ids of a span, in the trace of its parent if it has one."""
        if parent is not None:
            trace_id = parent.trace_id
        elif trace_id is None:
            trace_id = random_trace_id()
        sampled = parent is None or parent.sampled
        if self._sampler is not None:
            context = Context() if parent is None else context_of(parent)
            result = self._sampler.should_sample(context, trace_id, name, attributes=attributes)
            sampled = result.decision.name == "RECORD_AND_SAMPLE"
        if parent is None:
            return SpanReference(trace_id, random_span_id(), sampled, other_flags=_RANDOM_TRACE_ID)
        flags = parent.other_flags & _RANDOM_TRACE_ID
        return SpanReference(trace_id, random_span_id(), sampled, state=parent.state, other_flags=flags)

    def end_unsampled(self, span: SpanReference, end_ns: int) -> None:
        """Do nothing: there is no span, only its ids."""


def run_reference(identity: Identity) -> SpanReference:
    """Return the ids of `torch.run`: a hash if there may be several ranks, so that all of them link to the same span.

    The first rank exports that span, so it is remote to the others.
    """
    if identity.world_size == 1:
        return SpanReference(random_trace_id(), random_span_id(), sampled=True, other_flags=_RANDOM_TRACE_ID)
    digest = shared_digest(identity, "run")
    remote = identity.rank != 0
    return SpanReference(int.from_bytes(digest[:16]), int.from_bytes(digest[16:24]), sampled=True, remote=remote)


def run_trace(
    reference: SpanReference, time_ns: int, model: ModelInfo | None, config: Attributes, versions: Mapping[str, str]
) -> Trace:
    """Build the trace of the run: one span with configuration, versions and model."""
    attributes: dict[str, AttributeValue] = {names.CONFIG_PREFIX + name: value for name, value in config.items()}
    attributes.update(versions)
    if model is not None:
        attributes[names.MODEL] = model.name
        attributes[names.MODULE_COUNT] = model.modules
        attributes[names.MODULE_PARAMETERS] = model.parameters
    span = Span(SpanTemplate(names.SPAN_RUN, attributes), reference.span_id, 0, time_ns, time_ns + 1_000_000)
    return Trace(reference.trace_id, [span], {}, other_flags=reference.other_flags)
