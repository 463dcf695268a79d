"""All subjects, by where they come from."""

from collections.abc import Iterator

from fidelity import forward_subjects, layer_subjects, norm_subjects, torchvision_subjects, transformers_subjects
from fidelity.subjects import Subject


def subjects() -> Iterator[Subject]:
    """Yield all."""
    yield from layer_subjects.subjects()
    yield from forward_subjects.subjects()
    yield from norm_subjects.subjects()
    yield from norm_subjects.large()
    yield from torchvision_subjects.subjects()
    yield from transformers_subjects.subjects()
