"""How tests prove what a variable does: they say of which, and run a program under it."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

import torchotel
from support.otlp_http_receiver import Receiver
from support.recorded_training import plain
from torchotel.worker.stats import Stats

PROVEN: list[str] = []
"""The variables of all tests that have been imported."""
OTLP = "OTEL_EXPORTER_OTLP_"
SIGNALS = ("", "TRACES_", "METRICS_")

Test = Callable[..., None]


def proves(*names: str) -> Callable[[Test], Test]:
    """Run a test once for each of some variables."""
    PROVEN.extend(names)
    return pytest.mark.parametrize("variable", names)


def proves_option(option: str) -> Callable[[Test], Test]:
    """Run a test for an option of the exporter in its general form, and in those of the signals that we send."""
    return proves(*(f"{OTLP}{signal}{option}" for signal in SIGNALS))


class Program:
    """A program of one step, under the variables that a test sets."""

    def __init__(self, server: Receiver) -> None:
        self.server = server
        self.base = server.url.removesuffix("/v1/traces")
        self._pushed_before = 0

    def run(self, environ: dict[str, str], *, flush_s: float = 5.0) -> Stats:
        """Train a step; both signals go to the receiver over OTLP where `environ` says nothing else."""
        defaults = {f"{OTLP}ENDPOINT": self.base, "OTEL_METRICS_EXPORTER": "otlp"}
        self._pushed_before = len(self.server.pushed)
        with pytest.MonkeyPatch.context() as patch:
            for name, text in {**defaults, **environ}.items():
                patch.setenv(name, text)
            handle = torchotel.instrument()
            with torchotel.step(epoch=1):
                loss = torch.nn.Linear(4, 4)(torch.rand(2, 4)).sum()
                loss.backward()
                torchotel.log(loss=loss, note="abcdef")
            handle.flush(flush_s)
            handle.shutdown(1)
        return handle.stats()

    def span(self, name: str = "torch.step") -> Span:
        return next(span for span in self.server.spans if span.name == name)

    def metric(self, name: str) -> Metric:
        """Give a metric of the last run's first push: later ones hold what has changed where they hold differences."""
        pushed = self.server.pushed[self._pushed_before :]
        return next(metric for one in pushed for metric in _metrics(one.message) if metric.name == name)

    def resource(self) -> dict[str, Any]:
        resource = self.server.requests[-1].message.resource_spans[0].resource
        return {pair.key: plain(pair.value) for pair in resource.attributes}


def _metrics(message: Any) -> Iterable[Metric]:
    return (m for resource in message.resource_metrics for scope in resource.scope_metrics for m in scope.metrics)
