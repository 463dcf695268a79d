"""What torchotel reaches: every way to make a graph, to run it, to train on it and to leave Python."""

import pytest

from fidelity import graph_subjects, run_subjects
from fidelity.checked import check
from fidelity.subjects import Subject

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's own, of what it calls a prototype or deprecated

SUBJECTS = [*graph_subjects.subjects(), *run_subjects.subjects()]


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: f"{subject.kind}: {subject.name}")
def test_nothing_is_changed_and_the_trace_is_right(subject: Subject) -> None:
    """Every number is what it was, bit for bit, and every call has its spans in their places."""
    row = check(subject)
    assert row.repeats
    assert row.changed == []
    assert row.faults == []
    assert row.calls >= subject.steps


@pytest.mark.parametrize("subject", list(run_subjects.entered_in_the_midst()), ids=lambda subject: subject.name)
def test_runs_that_enter_a_graph_in_its_midst(subject: Subject) -> None:
    """Numbers are the same; the run has spans of those modules alone whose outputs it passes, or of their parts."""
    row = check(subject)
    assert row.repeats
    assert row.changed == []
    assert {fault.partition(" (")[0] for fault in row.faults} <= {"1 backward spans of"}
