"""An exporter that is made later than it is named: until then, and where it can't be made, no span is lost unseen."""

import pytest

from torchotel.exporters.base import ExportStats
from torchotel.exporters.factory import LateExporter
from torchotel.tracing.span import Span, SpanTemplate, Trace, TraceExporter

TRACE = Trace(1, [Span(SpanTemplate("step", {}), 2, 0, 3, 4)], {})


def test_spans_of_what_can_not_be_made_are_counted() -> None:
    def make() -> TraceExporter:
        raise ValueError("no such library")

    stats = ExportStats()
    exporter = LateExporter(make, stats)
    with pytest.raises(ValueError, match="no such library"):
        exporter.prepare()
    assert exporter.flush(0)
    exporter.export(TRACE)
    exporter.push()
    assert not exporter.flush(0)
    assert exporter.flush(0), "since the last flush nothing was lost"
    exporter.shutdown(0)
    assert stats.read().dropped == 1
