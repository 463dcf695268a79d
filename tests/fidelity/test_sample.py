"""One of each kind; `make fidelity` checks all."""

import pytest

from fidelity.all_subjects import subjects
from fidelity.checked import check
from fidelity.subjects import Subject
from fidelity.truth import measure

pytest.importorskip("torchvision")

SAMPLE = {
    "googlenet": "in-place ReLUs, concatenations, three outputs",
    "swin_t": "windows, shifted views, stochastic depth",
    "wide_resnet50_2": "too large for numbers",
    "lraspp_mobilenet_v3_large": "a mapping as output",
    "r3d_18": "three dimensions",
}
CHOSEN = [subject for subject in subjects() if subject.name in SAMPLE and not subject.kind.endswith("quantizable")]


@pytest.mark.parametrize("subject", CHOSEN, ids=lambda subject: subject.name)
def test_nothing_is_changed_and_the_trace_is_right(subject: Subject) -> None:
    """Every number is what it was, bit for bit, and every call has its spans in their places."""
    row = check(subject)
    assert row.repeats
    assert row.changed == []
    assert row.faults == []
    assert row.calls > 100


def test_times_of_backward_spans_are_those_of_the_nodes() -> None:
    """Together, leaves take what their nodes take, within half a hundredth or two microseconds an end."""
    (subject,) = [subject for subject in CHOSEN if subject.name == "googlenet"]
    backward = measure(subject).backward
    assert len(backward.ends_ns) > 100
    assert abs(backward.ratio - 1) < 0.005 or backward.end_us < 2
    assert backward.median_us < 100
