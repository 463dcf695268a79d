"""What torchotel reaches: every way to make a graph, to run it, to train on it and to leave Python."""

import pytest

from fidelity import (
    amp_subjects,
    func_subjects,
    graph_module_subjects,
    graph_subjects,
    loop_subjects,
    run_subjects,
)
from fidelity.checked import check
from fidelity.subjects import Subject
from fidelity.training import differences, train
from torchotel.testing import capture

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's own, of what it calls a prototype or deprecated

KINDS = (graph_subjects, run_subjects, amp_subjects, func_subjects, loop_subjects, graph_module_subjects)
SUBJECTS = [subject for kind in KINDS for subject in kind.subjects()]
PARTLY_SEEN = [*run_subjects.entered_in_the_midst(), *func_subjects.beyond()]


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: f"{subject.kind}: {subject.name}")
def test_nothing_is_changed_and_the_trace_is_right(subject: Subject) -> None:
    """Every number is what it was, bit for bit, and every call has its spans in their places."""
    row = check(subject)
    assert row.repeats
    assert row.changed == []
    assert row.faults == []
    assert row.calls >= subject.steps


@pytest.mark.parametrize("subject", SUBJECTS + PARTLY_SEEN, ids=lambda subject: f"{subject.kind}: {subject.name}")
def test_nothing_is_changed_with_the_hooks_in_and_out_in_turns(subject: Subject) -> None:
    """The second step has no hook on inner modules, and its numbers are the same."""
    expected = train(subject)
    with capture(detail=2) as captured:
        assert differences(expected, train(subject)) == []
    assert captured.handle.stats()["internal_errors"] == 0


@pytest.mark.parametrize("subject", PARTLY_SEEN, ids=lambda subject: f"{subject.kind}: {subject.name}")
def test_nothing_is_changed_where_not_all_of_a_backward_is_seen(subject: Subject) -> None:
    """Numbers are what they were, and forward spans are right: what can't be seen of the backward, the page tells."""
    row = check(subject)
    assert row.repeats
    assert row.changed == []
    assert [fault for fault in row.faults if " backward spans of " not in fault] == []
