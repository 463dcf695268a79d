"""Read a run once, and gather all that the page shows."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torchotel.report.page.series import Series
from torchotel.report.page.traces import Traces
from torchotel.report.read import Run, SpanLine
from torchotel.report.summary import Summary, summarise

Line = TypeVar("Line")


@dataclass(frozen=True)
class Content:
    """What the page is made from."""

    name: str
    """Of the run's folder."""
    info: Mapping[str, Any]
    summary: Summary
    series: Series
    traces: Traces

    @property
    def median_s(self) -> float:
        """How long a typical step takes; 0 where there was none."""
        return self.summary.phases[0].p50_s if self.summary.phases else 0.0


def gather(run: Run) -> Content:
    """Read a run; what is kept is bounded by its steps and layers, not by its spans.

    Raises:
        RunError: a file is damaged.
    """
    series = Series()
    traces = Traces(0.0)

    def spans() -> Iterator[SpanLine]:
        # Nothing runs here before the first span is asked for, and then all steps are known.
        durations = sorted(step.duration_s for step in series.steps)
        traces.median_s = durations[len(durations) // 2] if durations else 0.0
        yield from _watched(run.spans(), traces.add)
        traces.close()

    summary = summarise(_watched(run.units(), series.add), spans())
    return Content(run.folder.resolve().name, run.info, summary, series, traces)


def _watched(lines: Iterable[Line], watch: Callable[[Line], None]) -> Iterator[Line]:
    for line in lines:
        watch(line)
        yield line
