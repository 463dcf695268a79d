"""All subjects, by where they come from."""

from collections.abc import Iterator

from fidelity import (
    amp_subjects,
    compiled_subjects,
    forward_subjects,
    func_subjects,
    graph_module_subjects,
    graph_subjects,
    layer_subjects,
    loop_subjects,
    norm_subjects,
    run_subjects,
    torchvision_subjects,
    transformers_subjects,
)
from fidelity.subjects import Subject


def subjects() -> Iterator[Subject]:
    """Yield all."""
    yield from layer_subjects.subjects()
    yield from forward_subjects.subjects()
    yield from graph_subjects.subjects()
    yield from run_subjects.subjects()
    yield from func_subjects.subjects()
    yield from loop_subjects.subjects()
    yield from graph_module_subjects.subjects()
    yield from amp_subjects.subjects()
    yield from norm_subjects.subjects()
    yield from norm_subjects.large()
    yield from torchvision_subjects.subjects()
    yield from transformers_subjects.subjects()
    yield from compiled_subjects.subjects()
