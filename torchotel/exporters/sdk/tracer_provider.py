"""Replay spans through the program's TracerProvider."""

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter

from opentelemetry.context import Context
from opentelemetry.sdk.trace import Tracer as SdkTracer
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Link as LiveLink
from opentelemetry.trace import (
    NonRecordingSpan,
    NoOpTracer,
    ProxyTracer,
    SpanContext,
    SpanKind,
    StatusCode,
    Tracer,
    TracerProvider,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace import Span as LiveSpan

from torchotel import _semconv as names
from torchotel._records import Baggage, SpanReference
from torchotel._utils.faults import Warn
from torchotel._utils.gil import SLICE_ITEMS, GilYielder
from torchotel.exporters.base import ExportStats, TemplateCache, TraceExporter
from torchotel.exporters.sanitize import otlp_safe, otlp_safe_text, own_attributes, own_events
from torchotel.exporters.sdk.delivery import Delivery
from torchotel.exporters.sdk.provider_flush import PROVIDER_ERRORS
from torchotel.tracing.context import baggage_context, suppressed
from torchotel.tracing.ids import OTHER_FLAGS, context_of, own_random, random_span_id, random_trace_id, span_context_of
from torchotel.tracing.span import Attributes, AttributeValue, Span, SpanContextSource, SpanLink, Trace

MAX_STARTED = 4096
"""Spans of open steps whose context the program has read; older ones belong to dropped records."""
MAX_WAITING = 50_000
"""Started spans if the worker is behind and has not processed their records."""


class StartedSpans:
    """Keep started spans until their trace is replayed; bounded, since the record may be dropped."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a signal handler may start a span while this thread holds it
        self._spans: dict[tuple[int, int], tuple[LiveSpan, Context]] = {}

    def add(self, span: LiveSpan, context: Context) -> None:
        """Add a span and its parent context."""
        ids = span.get_span_context()
        with self._lock:
            self._spans[ids.trace_id, ids.span_id] = span, context
        if len(self._spans) > MAX_WAITING:
            self.end_oldest(MAX_WAITING)

    def get(self, trace_id: int, span_id: int) -> tuple[LiveSpan, Context] | None:
        """Return a span without removing it."""
        return self._spans.get((trace_id, span_id))

    def take(self, trace_id: int, span_id: int) -> tuple[LiveSpan, Context] | None:
        """Remove and return a span."""
        if (trace_id, span_id) not in self._spans:  # nearly always
            return None
        with self._lock:
            return self._spans.pop((trace_id, span_id), None)

    def end_oldest(self, keep: int = MAX_STARTED) -> None:
        """End all but the newest spans now; `torch.estimated` marks their end."""
        with self._lock:
            ids = list(self._spans)
            oldest = [self._spans.pop(key) for key in ids[: max(0, len(ids) - keep)]]
        for span, _ in oldest:  # without the lock: the program's processors run here, and may raise
            with contextlib.suppress(PROVIDER_ERRORS):
                span.set_attribute(names.ESTIMATED, "end")
                span.end()


_logger = logging.getLogger("torchotel")


class SharedTraceId(threading.local):
    """The id of the trace of the root that the calling thread starts; None: a new trace."""

    trace_id: int | None = None


class OwnRandomIds(RandomIdGenerator):
    """Draw random ids from a separate generator.

    Programs seed the global generator, and Dynamo resets it after each compilation, which would repeat ids.
    """

    def __init__(self) -> None:
        self.shared = SharedTraceId()

    def generate_span_id(self) -> int:
        """Return 64 random bits, not all 0."""
        return own_random.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        """Return 128 random bits, not all 0, or the id of the trace that the ranks share."""
        return self.shared.trace_id or own_random.getrandbits(128) or 1


def get_tracer(provider: TracerProvider, version: str) -> Tracer:
    """Return a tracer with a separate generator of ids, unless the program has its own id generator."""
    try:
        tracer = provider.get_tracer(names.SCOPE, version, schema_url=names.SCHEMA_URL)
    except Exception:  # a provider of the program may raise anything
        _logger.exception("the TracerProvider returned no tracer, so no spans are exported. Check its get_tracer()")
        return NoOpTracer()
    if isinstance(tracer, SdkTracer) and type(tracer.id_generator) is RandomIdGenerator:
        tracer.id_generator = OwnRandomIds()
    return tracer


RAISED = (
    "the TracerProvider raised at a span, which counts as dropped. Check its sampler and its span processors; further "
    "failures are only counted"
)
SPAN_ITEMS = SLICE_ITEMS // 16
"""Items that a span counts as: the GIL is yielded after 16 spans, about 0.2 ms."""
MAX_RENAMED = 64
ROOT_IDENTITY = (names.RANK, names.WORLD_SIZE, names.RUN_ID)
"""Resource attributes that are set on roots, because the provider's resource lacks them."""

_NOTHING = Context()
"""Empty: the current span of the worker or of a training step is not the parent."""


class _Dropped(NonRecordingSpan):
    """Replaces a span at which the program's sampler or processor raised; has the context of the parent."""


class TracerProviderExporter(TraceExporter, SpanContextSource):
    """Replay traces through the Tracer API, so that the provider's ids, sampler, limits and processors apply.

    Spans of `start` keep their ids; other spans get new ids of the provider. Spans start and end in the order of a
    program: children end before their parents. The provider is flushed, and never shut down.

    Args:
        provider: The program's provider.
        version: Version of torchotel, for the scope.
        resource: Resource attributes of torchotel; rank, world size and run id are set on roots.
        stats: Counts spans and failures.
        yielder: Counts spans, to yield the GIL.
    """

    keeps_late = False  # the API cannot export a span that was not sampled
    off = False  # the provider's sampler decides for each span

    def __init__(
        self,
        provider: TracerProvider,
        *,
        version: str,
        resource: Attributes | None = None,
        stats: ExportStats | None = None,
        yielder: GilYielder | None = None,
    ) -> None:
        self.stats = stats or ExportStats()
        self._resource = resource or {}
        self._yielder = yielder or GilYielder()
        self._get_tracer = partial(get_tracer, provider, version)
        self._tracer = self._get_tracer()
        self._delivery = Delivery(provider, self.stats)
        self._started = StartedSpans()
        self._templates = TemplateCache(lambda template: otlp_safe(template.attributes))
        self._renamed: dict[tuple[int, int], SpanContext] = {}
        """Contexts of roots that `start` did not create, by the ids in links to them: `torch.run`."""
        self._warn = Warn()

    def start(
        self,
        name: str,
        parent: SpanReference | None,
        start_ns: int,
        attributes: Attributes | None = None,
        baggage: Baggage | None = None,
        trace_id: int | None = None,
    ) -> SpanReference:
        """Start a span now, which ends when its trace is replayed; from any thread.

        With an id generator of the program, the ranks of a step do not share a trace.

        A recording span without the sampled flag is not sampled. If the program's sampler or processor raises, the
        trace is built nevertheless, so that each span is counted when its replay fails or succeeds.
        """
        above = None if parent is None else self._started.get(parent.trace_id, parent.span_id)
        try:
            outer = _outer(parent, baggage) if above is None else set_span_in_context(*above)
            with suppressed(), self._in_trace(trace_id):  # a sampler or a processor that runs a model is not recorded
                live = self._begin(name, outer, otlp_safe(attributes or {}), None, start_ns)
            context = live.get_span_context()
            recording = live.is_recording()
        except Exception as error:  # noqa: BLE001  # not SystemExit: a signal handler may end the program here
            self._failed(error)
            if parent is not None:
                trace_id = parent.trace_id
            return SpanReference(
                trace_id or random_trace_id(), random_span_id(), sampled=parent is None or parent.sampled
            )
        if recording or above is not None:  # otherwise no trace is built
            self._started.add(live, outer)
        sampled = recording and context.trace_flags.sampled
        state = context.trace_state.to_header() if context.trace_state else ""
        others = context.trace_flags & OTHER_FLAGS
        return SpanReference(context.trace_id, context.span_id, sampled, state=state, other_flags=others)

    def end_unsampled(self, span: SpanReference, end_ns: int) -> None:
        """End a root that the provider's sampler only records: the processors get it, the exporters do not."""
        started = self._started.take(span.trace_id, span.span_id)
        if started is None:
            return
        try:
            with suppressed():
                started[0].end(end_ns)
        except PROVIDER_ERRORS as error:
            self._failed(error)

    def export(self, trace: Trace) -> None:
        """Replay a trace; wait while the provider's queues are full."""
        if not self._delivery.accept(len(trace.spans)):
            return
        below = _below(trace.spans)
        common = otlp_safe(trace.attributes)
        todo: list[tuple[Span, LiveSpan | None, Context]] = [(trace.root, None, _above(trace))]
        while todo:
            span, live, context = todo.pop()
            if live is None:
                if self._delivery.closed:
                    continue  # only the spans that have children in the queues still end
                live, context = self._open(trace, span, context, common)
                if (children := below.get(span.span_id)) is not None:
                    todo.append((span, live, context))
                    context = set_span_in_context(live, context)
                    todo.extend((child, None, context) for child in children)
                    continue
            self._end(trace, span, live)

    def push(self) -> None:
        """End the oldest started spans, and flush old spans."""
        self._started.end_oldest()
        self._delivery.push()

    def flush(self, deadline_s: float) -> bool:
        """Flush the provider. Return False on timeout or if spans were dropped since the last flush."""
        return self._delivery.flush(deadline_s)

    def shutdown(self, deadline_s: float) -> None:
        """End the remaining spans and flush the provider by the deadline."""
        self._started.end_oldest(keep=0)
        self._delivery.close(deadline_s)

    def forget(self, trace: Trace) -> None:
        """Forget the root of a trace that is dropped, so that the provider never gets it without its children."""
        self._started.take(trace.trace_id, trace.root.span_id)

    def abandon(self) -> None:
        """Count all spans that the provider has not exported yet as dropped, without waiting."""
        self._delivery.abandon()

    def _begin(
        self, name: str, context: Context, attributes: Attributes, links: list[LiveLink] | None, start_ns: int
    ) -> LiveSpan:
        if isinstance(self._tracer, ProxyTracer):  # the global provider may be set now
            self._tracer = self._get_tracer()
        return self._tracer.start_span(otlp_safe_text(name), context, SpanKind.INTERNAL, attributes, links, start_ns)

    @contextlib.contextmanager
    def _in_trace(self, trace_id: int | None) -> Iterator[None]:
        """Give the root that the block starts this trace id."""
        generator = getattr(self._tracer, "id_generator", None)
        if trace_id is None or not isinstance(generator, OwnRandomIds):
            yield
            return
        generator.shared.trace_id = trace_id
        try:
            yield
        finally:
            generator.shared.trace_id = None

    def _open(self, trace: Trace, span: Span, context: Context, common: Attributes) -> tuple[LiveSpan, Context]:
        """Start a span unless `start` has, and return it with its parent context."""
        plain = span.attributes is None and span.error is None
        own = {} if plain else otlp_safe(own_attributes(span))
        attributes = {**self._templates[span.template], **common, **own}
        if span is trace.root:
            attributes |= self._identity()
        live, context = self._started.take(trace.trace_id, span.span_id) or (None, context)
        try:
            if live is not None:
                live.update_name(otlp_safe_text(span.template.name))
                live.set_attributes(attributes)
                for link in span.links:
                    live.add_link(*self._linked(link))
                return live, context
            links = [LiveLink(*self._linked(link)) for link in span.links] if span.links else None
            live = self._begin(span.template.name, context, attributes, links, span.start_ns)
        except PROVIDER_ERRORS as error:
            self._failed(error)
            return live or _Dropped(get_current_span(context).get_span_context()), context
        if span is trace.root:
            self._rename(trace, live)
        return live, context

    def _end(self, trace: Trace, span: Span, live: LiveSpan) -> None:
        self._yielder.spend(SPAN_ITEMS)
        if isinstance(live, _Dropped):
            self._delivery.dropped()
            return
        if not live.is_recording():
            self._delivery.sampled_out()
            return
        try:
            if span.events or span.error is not None:
                for event in own_events(span):
                    live.add_event(event.name, otlp_safe(event.attributes), event.time_ns)
            if span.error is not None:
                live.set_status(StatusCode.ERROR, otlp_safe_text(span.error.message))
            live.end(span.end_ns)
        except PROVIDER_ERRORS as error:
            self._failed(error)
            self._delivery.dropped()
            return
        context = live.get_span_context()
        if context.trace_flags.sampled:
            self._delivery.ended(context.trace_id if span is trace.root else None)
        else:  # recording only: processors get the span, exporters do not
            self._delivery.sampled_out()

    def _identity(self) -> dict[str, AttributeValue]:
        found = {name: self._resource.get(name) for name in ROOT_IDENTITY}
        return otlp_safe({name: value for name, value in found.items() if value is not None})

    def _rename(self, trace: Trace, live: LiveSpan) -> None:
        if len(self._renamed) >= MAX_RENAMED:
            del self._renamed[next(iter(self._renamed))]
        self._renamed[trace.trace_id, trace.root.span_id] = live.get_span_context()

    def _linked(self, link: SpanLink) -> tuple[SpanContext, Attributes]:
        reference = SpanReference(link.trace_id, link.span_id, link.sampled, link.remote, link.state, link.other_flags)
        context = self._renamed.get((link.trace_id, link.span_id)) or span_context_of(reference)
        return context, otlp_safe(link.attributes)

    def _failed(self, error: BaseException) -> None:
        self.stats.error(type(error).__name__)
        self._warn(RAISED, error=error)


def _outer(parent: SpanReference | None, baggage: Baggage | None) -> Context:
    """Return the parent context of a root."""
    context = baggage_context(baggage)
    return context if parent is None else context_of(parent, context)


def _above(trace: Trace) -> Context:
    """Return the parent context of a root that `start` did not create."""
    root = trace.root
    if not root.parent_id:
        return _NOTHING
    remote, state, flags = trace.remote_parent, trace.state, trace.other_flags
    return context_of(
        SpanReference(trace.trace_id, root.parent_id, sampled=True, remote=remote, state=state, other_flags=flags)
    )


def _below(spans: Sequence[Span]) -> dict[int, list[Span]]:
    """Return the children of each span, the last child first."""
    below: dict[int, list[Span]] = {}
    for span in spans[1:]:
        below.setdefault(span.parent_id, []).append(span)
    for children in below.values():
        children.sort(key=attrgetter("start_ns"), reverse=True)
    return below
