"""The steps that a companion makes from the phases on the page."""

import random

import pytest

from torchotel._records import Error, Phase, StepRecord
from torchotel.worker.status_page import MAX_PHASES, MAX_READABLE, PAGE_BYTES, PageReader, PhaseWriter, hide_phases
from torchotel.worker.unsent_steps import UnsentSteps

THREAD = 42
NOW_NS = 1_000_000
CAUSE = Error("process_ended", "")
NAMES = {"d": "data", "f": "forward", "e": "forward", "b": "backward", "o": "optimizer"}


class Training:
    """A page, and phases that follow each other: `d`ata, `f`orward, `e`valuating forward, `b`ackward, `o`ptimizer.

    A capital is a phase that stays open.
    """

    def __init__(self) -> None:
        self.page = memoryview(bytearray(PAGE_BYTES)).cast("Q")
        self.reader, self.writer = PageReader(self.page), PhaseWriter(self.page, THREAD)
        self.unsent = UnsentSteps(self.reader)
        self.now_ns = 0

    def run(self, phases: str) -> None:
        for letter in phases:
            self.now_ns += 10
            self.writer.begin(NAMES[letter.lower()], self.now_ns, grad=letter.lower() != "e")
            self.now_ns += 10
            if letter.islower():
                self.writer.end(NAMES[letter], self.now_ns)

    def receive(self, kind: str, number: int, start_ns: int, end_ns: int, thread: int = THREAD) -> None:
        self.unsent.add_received(StepRecord(kind, number, start_ns, end_ns, 0, thread, detailed=False))

    def unsent_records(self) -> list[StepRecord]:
        return self.unsent.records(self.reader.phases(NOW_NS), NOW_NS, CAUSE)

    def records(self) -> list[tuple[str, int, str, bool]]:
        """Return kind, number, the kinds of the phases, and whether each record failed."""
        return [
            (one.kind, one.number, " ".join(phase.kind for phase in one.phases), one.error is not None)
            for one in self.unsent_records()
        ]


WHOLE = "forward backward optimizer"


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ("", []),
        ("F", [("step", 0, "forward", True)]),
        ("ffbo", [("step", 0, WHOLE, False)]),
        (
            "fbofboF",
            [("step", 0, WHOLE, False), ("step", 1, f"between {WHOLE}", False), ("step", 2, "between forward", True)],
        ),
        ("dfboD", [("step", 0, f"data {WHOLE}", False), ("step", 1, "between data", True)]),
        ("dfbodf", [("step", 0, f"data {WHOLE}", False), ("step", 1, "between data forward", True)]),
        ("dfbod", [("step", 0, f"data {WHOLE}", False)]),
        ("dfbdfB", [("step", 0, "data forward backward data forward backward", True)]),
        ("dfbofbO", [("step", 0, f"data {WHOLE} {WHOLE}", True)]),
        ("fbE", [("step", 0, "forward backward forward", True)]),
        ("fboE", [("step", 0, WHOLE, False), ("evaluation", 0, "forward", True)]),
        ("dede", [("evaluation", 0, "data forward", False), ("evaluation", 1, "data forward", True)]),
        ("deded", [("evaluation", 0, "data forward", False), ("evaluation", 1, "data forward", False)]),
        ("dEF", [("step", 0, "data forward forward", True)]),
    ],
)
def test_phases_are_divided_into_steps_and_evaluations(phases: str, expected: list[tuple[str, int, str, bool]]) -> None:
    """A fetch or a forward after an ended optimizer begins a step; after a fetch, several networks may train."""
    training = Training()
    training.run(phases)
    assert training.records() == expected


def test_what_was_received_is_not_made_again() -> None:
    training = Training()
    training.run("fbofbF")
    training.receive("step", 7, 5, 60)
    assert training.records() == [("step", 8, "between forward backward forward", True)]


def test_an_evaluation_may_be_received_before_the_step_that_it_follows() -> None:
    training = Training()
    training.run("fboe")
    training.receive("evaluation", 3, 70, 80)
    assert training.records() == [("step", 0, WHOLE, False)]


def test_records_of_other_threads_cover_no_phase() -> None:
    """Their numbers count."""
    training = Training()
    training.run("F")
    training.receive("step", 4, 0, 500, thread=7)
    assert training.records() == [("step", 5, "forward", True)]


def test_the_time_before_a_step_is_without_the_evaluations_since_the_last_step() -> None:
    training = Training()
    training.now_ns = 1000
    training.run("B")
    training.receive("step", 0, 0, 100)
    training.receive("evaluation", 0, 200, 500)
    (record,) = training.unsent_records()
    assert record.phases == [Phase("between", 400, 1010), Phase("backward", 1010, NOW_NS, CAUSE, estimated="end")]
    assert (record.start_ns, record.end_ns) == (400, NOW_NS)


def test_a_forward_reaches_to_the_backward_as_in_a_record() -> None:
    training = Training()
    training.run("ffbo")
    (record,) = training.unsent_records()
    assert record.phases == [Phase("forward", 10, 50), Phase("backward", 50, 60), Phase("optimizer", 70, 80)]


def test_an_optimizer_inside_of_the_backward_ends_the_step() -> None:
    training = Training()
    training.run("fBo")
    training.writer.end("backward", 100)
    training.now_ns = 100
    training.run("F")
    assert training.records() == [
        ("step", 0, "forward backward optimizer", False),
        ("step", 1, "between forward", True),
    ]


def test_a_second_companion_makes_no_step_whose_number_is_unknown() -> None:
    training = Training()
    training.run("fbo")
    hide_phases(training.page)
    training.run("F")
    assert training.records() == []
    training.receive("step", 3, 5, 60)
    assert training.records() == [("step", 4, "between forward", True)]


def test_a_step_of_many_phases_has_no_time_before_its_first_phase() -> None:
    """The page has only its last phases."""
    training = Training()
    training.receive("step", 0, 0, 5)
    training.run("fb" * MAX_PHASES)
    (record,) = training.unsent_records()
    assert record.phases[0].kind == "backward"
    assert len(record.phases) == MAX_READABLE


def test_the_open_record_is_made_as_often_as_it_is_asked_for() -> None:
    """It covers nothing: the process may go on."""
    training = Training()
    training.run("fboB")
    open_records = [training.unsent.open_record(training.reader.phases(NOW_NS), NOW_NS, CAUSE) for _ in range(2)]
    assert [(record.kind, record.number) for record in open_records if record is not None] == [("step", 1)] * 2
    training.writer.end("backward", training.now_ns)
    training.run("o")
    assert training.unsent.open_record(training.reader.phases(NOW_NS), NOW_NS, CAUSE) is None
    assert [number for _, number, *_ in training.records()] == [0, 1]


def test_garbage_makes_bounded_records() -> None:
    words = random.Random(1)
    for bits in (2, 20, 64):
        for _ in range(200):
            training = Training()
            for index in range(len(training.page)):
                training.page[index] = words.getrandbits(bits)
            assert len(training.unsent_records()) <= MAX_READABLE
