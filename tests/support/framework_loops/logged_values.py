"""Read the values that frameworks published in a training."""

from torchotel import _semconv as names
from torchotel._records import LogValue
from torchotel.testing import Captured
from torchotel.tracing.span import AttributeValue


def of_steps(captured: Captured, *wanted: str) -> list[tuple[AttributeValue | None, ...]]:
    """Return attributes of all steps; None for an attribute that a step lacks."""
    return [tuple(step.attributes.get(name) for name in wanted) for step in captured.steps]


def all_of(captured: Captured, name: str) -> list[LogValue]:
    """Return all values of a name, including those that arrived after their step."""
    return [record.values[name] for record in captured.records if name in record.values]


EPOCH, LOSS, RATE = names.EPOCH, names.LOSS, names.LEARNING_RATE
STEP = "torch.log.global_step"
