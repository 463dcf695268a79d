"""Use your own TracerProvider: its sampler, processors and exporter apply to every span.

    python examples/own_provider.py

In this example the sampler drops validation, and a processor sets the team on each span. In Jaeger
(http://localhost:16686) there are only traces of `torch.step`, each span with `team=digits`. The program prints the
number of spans that were sampled out.
"""

import sys
from collections.abc import Sequence

import torch
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Decision, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

import torchotel

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    sys.exit(f"{error}; this example needs: pip install scikit-learn")


class NoEvaluations(Sampler):
    """Drops traces of evaluations; with `ParentBased` the decision applies to all spans of the trace."""

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """Decide by the name of the root span."""
        if name == "torch.evaluation":
            return SamplingResult(Decision.DROP)
        return ALWAYS_ON.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        """Return the name of the sampler."""
        return type(self).__name__


class Team(SpanProcessor):
    """Sets the team on each span."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Set the attribute when a span starts."""
        span.set_attribute("team", "digits")


def train() -> None:
    """Train two epochs, and validate after each."""
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    training, validation = random_split(TensorDataset(pixels, torch.tensor(digits.target)), [0.8, 0.2])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        for images, labels in DataLoader(training, batch_size=128, shuffle=True):
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
        with torch.no_grad():
            for images, _ in DataLoader(validation, batch_size=128):
                model(images)


def main() -> None:
    """Train with a provider as a platform team would configure it."""
    torch.manual_seed(0)
    provider = TracerProvider(
        sampler=ParentBased(NoEvaluations()), resource=Resource.create({"service.name": "own-provider"})
    )
    provider.add_span_processor(Team())
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))  # to OTEL_EXPORTER_OTLP_ENDPOINT
    handle = torchotel.instrument(tracer_provider=provider)
    train()
    handle.shutdown()  # flushes the provider
    provider.shutdown()  # torchotel does not shut it down
    counts = handle.stats()
    print(f"{counts['steps']} steps, {counts['evaluations']} evaluations")
    print(f"{counts['spans_exported']} spans exported, {counts['spans_sampled_out']} sampled out")


if __name__ == "__main__":
    main()
