"""All subjects, by where they come from."""

from collections.abc import Iterator

from fidelity import torchvision_subjects
from fidelity.subjects import Subject


def subjects() -> Iterator[Subject]:
    """Yield all."""
    yield from torchvision_subjects.subjects()
