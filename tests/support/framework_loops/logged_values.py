"""What frameworks have told of a training, as it arrived."""

from torchotel import _semconv as names
from torchotel._records import LogValue
from torchotel.testing import Captured
from torchotel.tracing.span import AttributeValue


def of_steps(captured: Captured, *wanted: str) -> list[tuple[AttributeValue | None, ...]]:
    """Give attributes of all steps; None for one that a step has not."""
    return [tuple(step.attributes.get(name) for name in wanted) for step in captured.steps]


def all_of(captured: Captured, name: str) -> list[LogValue]:
    """Give all values of a name, those that came after their step too."""
    return [record.values[name] for record in captured.records if name in record.values]


EPOCH, LOSS, RATE = names.EPOCH, names.LOSS, names.LEARNING_RATE
STEP = "torch.log.global_step"
