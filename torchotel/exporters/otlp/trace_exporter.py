"""Batch encoded spans into requests for the sender."""

import time
from collections.abc import Sequence
from functools import cached_property

from torchotel._limits import MAX_REQUEST_BYTES, MAX_REQUEST_SPANS
from torchotel._utils.faults import Warn
from torchotel._utils.gil import SLICE_ITEMS, GilYielder
from torchotel.exporters.base import ExportStats, TraceExporter
from torchotel.exporters.otlp.encoder import EncodedSpan, Envelope, SpanEncoder
from torchotel.exporters.otlp.sender import Sender
from torchotel.exporters.otlp.transport import Transport
from torchotel.exporters.sanitize import DEFAULT_LIMITS, Limiter, SpanLimits
from torchotel.tracing.span import Attributes, SpanTemplate, Trace

SPANS_PER_ITEM = 4
"""Spans that are joined in the time of one item of `GilYielder`."""


class Batch:
    """Collect encoded spans of several traces, grouped by template.

    Deflate finds repetitions within 32 KiB (https://www.rfc-editor.org/rfc/rfc1951, section 2), and a step of a hundred
    modules is larger. A compressed span takes 31 bytes in the order of the traces, and 21 bytes grouped by template.
    """

    def __init__(self) -> None:
        self.count = 0
        self.size = 0
        """Bytes."""
        self.traces: list[int] = []
        """Ids of the traces whose roots are in the batch."""
        self._by_template: dict[SpanTemplate, list[bytes]] = {}

    def add(self, spans: Sequence[EncodedSpan], size: int) -> None:
        """Add spans with their total size."""
        groups = self._by_template
        for template, data in spans:
            group = groups.get(template)
            if group is None:
                groups[template] = [data]
            else:
                group.append(data)
        self.count += len(spans)
        self.size += size

    def pieces(self, yielder: GilYielder) -> list[bytes]:
        """Return the joined spans of each template, in the order in which they were added.

        Args:
            yielder: Counts spans, to yield the GIL: a request has megabytes.
        """
        pieces: list[bytes] = []
        for group in self._by_template.values():
            pieces.append(b"".join(group))
            yielder.spend(-(-len(group) // SPANS_PER_ITEM))
        return pieces


MAX_AGE_S = 1.0
"""Age of a batch that is sent even if it is not full."""


class RequestExporter(TraceExporter):
    """Encode traces into requests of bounded size and pass them to a sender.

    `export` and `push` never wait for the endpoint.

    Args:
        transport: Connection to the endpoint.
        resource: Attributes of the resource.
        version: Version of torchotel, for the scope.
        limits: Limits of a span.
        stats: Counts spans and failures.
        max_request_spans: Spans in a request.
        max_request_bytes: Size of a request before compression.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        resource: Attributes,
        version: str,
        limits: SpanLimits = DEFAULT_LIMITS,
        stats: ExportStats | None = None,
        max_request_spans: int = MAX_REQUEST_SPANS,
        max_request_bytes: int = MAX_REQUEST_BYTES,
    ) -> None:
        self.stats = stats or ExportStats()
        self._yielder = GilYielder()
        self._limiter = Limiter(limits, self._yielder)
        self._encoder = SpanEncoder(self._yielder)
        self._resource, self._version = resource, version
        self._sender = Sender(transport, self.stats)
        self._max_spans = max_request_spans
        self._max_bytes = max_request_bytes
        self._batch = Batch()
        self._since_s = 0.0
        self._warn = Warn()
        self._has_dropped = False
        """Whether spans were dropped because of an error since the last `flush`."""

    def export(self, trace: Trace) -> None:
        """Add a trace to the batch; a trace that is too large for a request is split."""
        added = 0
        try:
            for spans in self._encoder.slices(self._limiter.apply(trace)):
                self._add(spans)
                if not added:  # the first slice has the root
                    self._batch.traces.append(trace.trace_id)
                added += len(spans)
        except Exception as error:  # noqa: BLE001  # the next trace may succeed
            self._failed(error, len(trace.spans) - added)
        self.push_due()

    def push_due(self) -> None:
        """Push a batch that is old enough. While another request is being sent, it grows up to a full request."""
        if self._batch.count and time.monotonic() - self._since_s > MAX_AGE_S and not self._sender.is_busy:
            self.push()

    def push(self) -> None:
        """Pass the batch to the sender, without waiting."""
        if not self._batch.count:
            return
        batch, self._batch = self._batch, Batch()
        try:
            pieces = batch.pieces(self._yielder)
            self._yielder.spend(SLICE_ITEMS)  # `wrap` takes as long as joining all pieces
            body = self._envelope.wrap(pieces)
        except Exception as error:  # noqa: BLE001  # the next trace may succeed
            self._failed(error, batch.count)
        else:
            self._sender.put(body, batch.count, batch.traces)

    def flush(self, deadline_s: float) -> bool:
        """Wait for the sender; return False on timeout or if spans were dropped since the last flush."""
        dropped, self._has_dropped = self._has_dropped, False
        return self._sender.flush(deadline_s) and not dropped

    def shutdown(self, deadline_s: float) -> None:
        """Send all spans by the deadline and end the sender."""
        self.push()
        self._sender.shutdown(deadline_s)

    @cached_property
    def _envelope(self) -> Envelope:
        """The envelope of all requests, created with the first one, when the rank is known."""
        return Envelope(self._resource, self._version)

    def _failed(self, error: Exception, spans: int) -> None:
        self._has_dropped = True
        self.stats.error(type(error).__name__)
        self.stats.dropped(spans)
        self._warn("Could not encode a trace; further ones are only counted", error=error)

    def _add(self, spans: Sequence[EncodedSpan]) -> None:
        size = sum([len(data) for _, data in spans])
        if self._batch.count + len(spans) > self._max_spans or self._batch.size + size > self._max_bytes:
            self.push()
        if not self._batch.count:
            self._since_s = time.monotonic()
        self._batch.add(spans, size)
