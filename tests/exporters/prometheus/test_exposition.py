"""Our writing of the two formats holds what prometheus_client's does."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from torchotel._records import DeviceMemory, GradientNorms, ModuleInfo, SpanReference, StepRecord, TensorGradient
from torchotel._utils.faults import Guard
from torchotel._utils.gil import SLICE_ITEMS, GilYielder
from torchotel.exporters.prometheus.collector import RegistryMetricExporter
from torchotel.exporters.prometheus.exposition import Exposition
from torchotel.metrics.store import Metrics
from torchotel.tracing.call_tree import CallTree
from torchotel.tracing.span import Attributes

NASTY = 'a "quoted" \\ and\nbroken ü \udce9'
RESOURCE: Attributes = {"service.name": NASTY, "torch.rank": 3}


def filled() -> Metrics:
    """Make metrics with every kind of value that they can have."""
    metrics = Metrics(lambda: {"exported": 2_000_000}, lambda: {NASTY: 1}, module_histograms=True)
    module = ModuleInfo("Net", NASTY, "Linear", 1, 1)
    for number, length_ns in enumerate((3_000_000, 4_000_000, 900_000_000_000)):
        unit = StepRecord("step", number, 0, length_ns, 10**18, 1, number % 2 == 0)
        unit.values = {"loss": 1e-30, "samples": 10**7, NASTY: -0.1, "huge": 1.5e300}
        unit.gradients = GradientNorms(1e9, ((module, 0.1),))
        unit.tensor_gradients = [TensorGradient(0, NASTY, "2", 5.0)]
        unit.memory = (DeviceMemory("cuda:0", 10**11, 2 * 10**11, 3 * 10**11),)
        metrics.add(unit, CallTree(), SpanReference(number + 1, number + 7, sampled=True))
    metrics.exported([1, 3])
    return metrics


@pytest.mark.parametrize(
    ("openmetrics", "generate", "parse"),
    [(False, generate_latest, parse_text), (True, generate_openmetrics, parse_openmetrics)],
    ids=["text", "openmetrics"],
)
def test_both_writers_hold_the_same(openmetrics: bool, generate: Any, parse: Any) -> None:  # noqa: FBT001  # a parameter of the test
    """Families, their help, type and unit, samples and exemplars, in the same order."""
    metrics, registry = filled(), CollectorRegistry()
    RegistryMetricExporter(registry, metrics, RESOURCE, Guard("the test"))
    exposition = Exposition(metrics, RESOURCE)
    for _ in range(2):  # the second time from what was kept of the first
        assert list(parse(exposition.write(openmetrics).decode())) == list(parse(generate(registry).decode()))


def test_exemplars_are_there_to_be_compared() -> None:
    """Two of three traces arrived."""
    assert Exposition(filled(), {}).write(openmetrics=True).count(b' # {span_id="') == 2


def test_a_long_answer_is_written_in_slices() -> None:
    """Whoever trains meanwhile gets its turn between them, and the answer is the same."""
    metrics, rests = Metrics(dict, dict), list[int]()
    unit = StepRecord("step", 0, 0, 1, 10**18, 1, detailed=True)
    unit.gradients = GradientNorms(1.0, tuple((ModuleInfo("Net", f"{i}", "Linear", 1, 1), 0.5) for i in range(200)))
    unit.memory = tuple(DeviceMemory(f"cuda:{i}", 1, 2, 3) for i in range(200))
    metrics.add(unit, CallTree(), None)

    answer = Exposition(metrics, {}, GilYielder(lambda: rests.append(1))).write(openmetrics=True)

    assert len(rests) >= 800 // SLICE_ITEMS  # no metric alone has so many lines
    assert answer == Exposition(metrics, {}).write(openmetrics=True)
