"""A subject held to both promises: nothing changed, and the trace is right."""

import time
from typing import NamedTuple

from fidelity.counted import counting
from fidelity.norms import NormErrors, norm_errors
from fidelity.subjects import Subject
from fidelity.traces import faults
from fidelity.training import differences, train
from torchotel.testing import capture


class Row(NamedTuple):
    """What came of it."""

    subject: Subject
    calls: int
    spans: int
    """Of modules, forward and backward."""
    repeats: bool
    """Whether two trainings without torchotel are the same: else nothing can be said."""
    changed: list[str]
    """What is not bit for bit what it was without torchotel."""
    faults: list[str]
    """What is wrong in the trace."""
    norms: NormErrors | None
    """None where they are not compared."""
    seconds: float


def check(subject: Subject) -> Row:
    """Train without torchotel, then with all detail, and compare."""
    began_s = time.monotonic()
    plain = train(subject)
    with capture(max_spans=None, gradient_norms=True) as captured, counting() as counted:
        watched = train(subject, counted.built)
    changed = differences(plain, watched)
    repeats = not changed or not differences(plain, train(subject))
    spans = sum("torch.direction" in span.attributes for root in captured.roots for span in root.walk())
    found = faults(counted, captured)
    wanted = subject.loop is None if subject.norms is None else subject.norms
    norms = norm_errors(watched, captured) if wanted and subject.device != "meta" else None
    return Row(subject, len(counted.calls), spans, repeats, changed, found, norms, time.monotonic() - began_s)
