"""Every row of the steps page's table, by the machine alone: an event is a letter, the clock is ours.

`D` fetch, `.` iterator's end, `F` outermost forward, `f` the same without gradients, `B` backward, `O` `P` `Q`
optimizers, `s` a step that GradScaler left out, `(…)` what happens inside optimizer O, `[…]` inside a backward.
"""

from collections.abc import Callable
from itertools import pairwise

import pytest

from torchotel._limits import MAX_BETWEEN_NS
from torchotel._records import Error, SpanReference, StepRecord
from torchotel.capture.step_detector import MAX_FORWARDS, MAX_OPTIMIZERS, WITHOUT_OPTIMIZER, StepDetector
from torchotel.capture.step_segment import StepSegment, build_record

LETTERS = {"data": "D", "forward": "F", "backward": "B", "optimizer": "O"}


class Listener:
    """Pass records on, and nothing else.

    Args:
        on_record: Gets each record's kind and segments.
        user_span: Returns the user's span that is current.
    """

    def __init__(
        self,
        on_record: Callable[[str, list[StepSegment]], None],
        user_span: Callable[[], SpanReference | None] = lambda: None,
    ) -> None:
        self.on_record, self.user_span = on_record, user_span

    def baggage(self) -> None:
        """Return no baggage."""

    def alignment(self, ahead: int) -> None:
        """Return no alignment: there are no other ranks."""

    def on_segment_begin(self) -> None:
        """Do nothing."""

    def on_segment_end(self, segment: StepSegment) -> None:
        """Do nothing."""


class Program:
    """Play events to a machine and keep what it hands over: (kind, phases, start, end)."""

    def __init__(self) -> None:
        self.handed: list[tuple[str, str]] = []
        self.times: list[tuple[int, int]] = []
        """First and last event of what was handed over."""
        self.units: list[StepRecord] = []
        """Records of it."""
        self.now = 0
        self.user_span: SpanReference | None = None
        self.machine = StepDetector(Listener(self._emit, lambda: self.user_span))

    def play(self, events: str) -> "Program":
        """Play one event a letter; each starts 10 after the last and lasts 10."""
        for event in events.replace(" ", ""):
            self._play(event)
        return self

    def end(self) -> list[tuple[str, str]]:
        """End the program; return all that was handed over."""
        self.machine.end()
        return self.handed

    def _play(self, event: str) -> None:
        machine = self.machine
        if event == "D":
            machine.fetched(self._tick(), self._tick())
        elif event == ".":
            machine.iterator_ended()
        elif event in "Ff":
            machine.forward_begins(self._tick(), grad=event == "F")
            machine.forward_ends(self._tick())
        elif event in "OPQ":
            machine.optimizer_begins(self._tick(), event, "SGD")
            machine.optimizer_ends(self._tick(), event)
        elif event == "s":
            machine.optimizer_skipped(self._tick(), "O")
        elif event == "B":
            self.play("[]")
        else:
            self._nest(event)

    def _nest(self, event: str) -> None:
        nesting: dict[str, Callable[[], object]] = {
            "[": lambda: self.machine.backward_begins(self._tick(), in_forward=False),
            "]": lambda: self.machine.backward_ends(self._tick()),
            "(": lambda: self.machine.optimizer_begins(self._tick(), "O", "LBFGS"),
            ")": lambda: self.machine.optimizer_ends(self._tick(), "O"),
        }
        nesting[event]()

    def _tick(self) -> int:
        self.now += 10
        return self.now

    def _emit(self, kind: str, parts: list[StepSegment]) -> None:
        phases = "".join(LETTERS[phase.kind] for part in parts for phase in part.phases)
        self.handed.append((kind, phases))
        self.times.append((parts[0].start_ns, max(part.end_ns for part in parts)))
        self.units.append(build_record(kind, len(self.units), parts, 0, None, 0))


def _steps(*phases: str) -> list[tuple[str, str]]:
    return [("step", one) for one in phases]


@pytest.mark.parametrize(
    ("name", "events", "steps"),
    [
        ("plain loop with a loader", "DFBO DFBO .", ["DFBO", "DFBO"]),
        ("plain loop without a loader", "FBO FBO FBO", ["FBO", "FBO", "FBO"]),
        ("one batch, fetched once", "DFBO FBO FBO", ["DFBO", "FBO", "FBO"]),
        ("accumulation over four batches", "DFBDFBDFBDFBO DFBDFBDFBDFBO .", ["DFBDFBDFBDFBO"] * 2),
        ("accumulation without a loader", "FBFBO FBFBO", ["FBFBO", "FBFBO"]),
        ("GAN with a loader", "DFBFBOFBP DFBFBOFBP .", ["DFBFBOFBO"] * 2),
        ("GAN without a loader", "FBOFBP FBOFBP FBOFBP", ["FBOFBO"] * 3),
        ("two optimizers after one backward", "DFBOP DFBOP", ["DFBOO", "DFBOO"]),
        ("LBFGS with a closure", "(FBFBFB) (FBFB)", ["OFBFBFB", "OFBFB"]),
        ("LBFGS with a loader", "D(FBFBFB) D(FBFB) .", ["DOFBFBFB", "DOFBFB"]),
        ("Lightning: forward and backward inside the step", "D(FB) D(FB) .", ["DOFB", "DOFB"]),
        ("optimizers in backward", "DF[OPQ] DF[OPQ] .", ["DFBOOO", "DFBOOO"]),
        ("optimizers in backward without a loader", "F[OPQ] F[OPQ]", ["FBOOO", "FBOOO"]),
        ("GradScaler that skips", "DFBs DFBO DFBs .", ["DFB", "DFBO", "DFB"]),
        ("prefetching iterator (Accelerate)", "DD FBO D FBO D FBO . FBO", ["DDFBO", "DFBO", "DFBO", "FBO"]),
        ("batches fetched ahead (Trainer)", "DDDD FBFBFBFBO DDDD FBFBFBFBO .", ["DDDDFBFBFBFBO"] * 2),
        ("frozen teacher first", "DfFBO DfFBO .", ["DFBO", "DFBO"]),
        ("two towers, one loss", "FFBO FFBO", ["FBO", "FBO"]),
        ("two loaders zipped", "DDFBO DDFBO D.", ["DDFBO", "DDFBO"]),
        ("a second training with another optimizer", "FBO FBO FBP FBP FBP", ["FBO"] * 5),
        ("GAN after another training", "FBQ FBQ FBOFBP FBOFBP FBOFBP", ["FBO"] * 2 + ["FBOFBO"] * 3),
        ("GAN after a training of its generator", "FBP FBP FBOFBP FBOFBP FBOFBP", ["FBO"] * 8),
        ("GAN after a training of its critic", "FBO FBO FBOFBP FBOFBP FBOFBP", ["FBO"] * 8),
        ("a training after a GAN", "FBOFBP FBOFBP FBQ FBQ FBQ", ["FBOFBO"] * 2 + ["FBO"] * 3),
        ("a training of the generator after a GAN", "FBOFBP FBOFBP FBP FBP FBP", ["FBOFBO"] * 2 + ["FBO"] * 3),
        ("GAN after a training with a loader", "DFBQ DFBQ . FBOFBP FBOFBP", ["DFBO"] * 2 + ["FBOFBO"] * 2),
        (
            "GAN that leaves out its critic",
            "FBOFBP FBOFBP FBP FBOFBP FBOFBP",
            ["FBOFBO"] * 2 + ["FBO"] + ["FBOFBO"] * 2,
        ),
        ("GAN that leaves out its generator", "FBOFBP FBOFBP FBO FBOFBP", ["FBOFBO"] * 2 + ["FBO", "FBOFBO"]),
        ("three optimizers after a training of the first", "FBO FBO FBOFBPFBQ FBOFBPFBQ", ["FBO"] * 8),
        ("critic with two updates a turn", "FBO FBO FBP FBO FBO FBP", ["FBO"] * 6),
        ("generator with two updates a turn", "FBO FBP FBP FBO FBP FBP", ["FBO"] * 6),
        ("GAN that accumulates many batches", ("FB" * 40 + "O" + "FB" * 40 + "P") * 3, [("FB" * 40 + "O") * 2] * 3),
        ("policy that accumulates, and is updated seldom", "FBO FBO FBFBP FBO FBO FBFBP", ["FBO", "FBO", "FBFBO"] * 2),
    ],
)
def test_one_step_for_each_step_of_the_program(name: str, events: str, steps: list[str]) -> None:
    """Each program of the table gives the steps that its author would count."""
    del name
    assert Program().play(events).end() == _steps(*steps)


@pytest.mark.parametrize("events", ["FBOFBP FBOFBP F", "FBO FBO F"])
def test_a_forward_that_ends_the_run_comes_after_the_last_whole_step(events: str) -> None:
    """Its number is that of the next step; with two optimizers and no loader, the last step still waits."""
    program = Program().play(events)
    program.machine.end(Error("RuntimeError", "ended"))
    assert [kind for kind, _ in program.handed] == ["step", "step", "evaluation"]


@pytest.mark.parametrize(
    "events",
    [
        "DFBO DFBO . Df Df . DFBO DFBO .",
        "FBO FBO f f FBO",
        "FBFBO f FBFBO",
        "DFBFBOFBP f DFBFBOFBP .",
        "FBOFBP f f FBOFBP FBOFBP",
        "DDDD FBFBFBFBO DDDD FBFBFBFBO .",
        "(FBFBFB) f (FBFB)",
        "DF[OPQ] DF[OPQ] .",
        "DFB DFB DFB",
        "DFBO . DDD . DFBO",
    ],
)
def test_every_moment_of_a_training_is_in_a_step_or_an_evaluation(events: str) -> None:
    """A step starts where the one before ended, later by the evaluations since."""
    program = Program().play(events)
    program.end()
    steps = [unit for unit in program.units if unit.kind == "step"]
    for before, after in pairwise(steps):
        evaluated = [unit for unit in program.units if unit.kind == "evaluation" and unit.start_ns >= before.end_ns]
        lasted = sum(unit.end_ns - unit.start_ns for unit in evaluated if unit.end_ns <= after.end_ns)
        assert after.start_ns == before.end_ns + lasted
        assert (after.phases[0].kind, after.phases[0].start_ns) == ("between", after.start_ns)
    assert steps[0].phases[0].kind != "between"


def test_a_long_gap_is_not_part_of_the_step() -> None:
    """A night in a notebook is no step time, and the step says how long it was."""
    program = Program().play("FBO")
    program.now += MAX_BETWEEN_NS
    program.play("FBO FBO").end()
    assert [unit.end_ns - unit.start_ns for unit in program.units] == [50, 50, 60]
    assert [unit.gap_ns for unit in program.units] == [0, MAX_BETWEEN_NS + 10, 0]


def test_a_pause_is_not_part_of_the_step() -> None:
    """What runs while capture is paused is not seen, so nothing can be said of it."""
    program = Program().play("FBO")
    program.machine.end()
    program.play("FBO FBO").end()
    assert [unit.between_ns for unit in program.units] == [0, 0, 10]
    assert [unit.gap_ns for unit in program.units] == [0, 10, 0]


def test_a_step_that_is_current_starts_where_the_one_before_ended() -> None:
    """Its span may be asked for before anything of it is handed over, by a fetch above all."""
    program = Program().play("DFBO")
    machine = program.machine
    current = machine.current(200)
    assert current is not None
    assert current[1] == program.now
    ended = program.now
    machine.fetched(200, 210)
    current = machine.current(None)
    assert current is not None
    assert current[1] == ended


def test_validation_between_epochs() -> None:
    """Validation batches are evaluations, and no step is longer for them."""
    program = Program().play("DFBO . Df Df . DFBO .")
    assert program.end() == [("step", "DFBO"), ("evaluation", "D"), ("evaluation", "D"), ("step", "DFBO")]
    assert program.times == [(10, 80), (90, 120), (130, 160), (170, 240)]


def test_a_metric_after_the_optimizer() -> None:
    """A metric that is a module, called after the optimizer, is an evaluation, and the step is no longer for it."""
    program = Program().play("DFBOf DFBO .")
    assert program.end() == [("evaluation", ""), ("step", "DFBO"), ("step", "DFBO")]
    assert program.times[1] == (10, 80)


def test_generation_makes_evaluations_only() -> None:
    """Forwards without gradients and without a loader are an evaluation each, handed over as they end."""
    program = Program().play("fff")
    assert program.handed == [("evaluation", "")] * 3
    assert program.end() == [("evaluation", "")] * 3


def test_validation_with_gradients_on() -> None:
    """Batches that nothing trains on are evaluations, gradients or not."""
    assert Program().play("DFDFDF.").end() == [("evaluation", "D")] * 3


def test_serving_with_gradients_on() -> None:
    """Another user's span begins another evaluation, and so do very many forwards of a thread that never trains."""
    program = Program()
    for request in range(3):
        program.user_span = SpanReference(1, request + 1, sampled=True)
        program.play("FF")
    assert len(program.end()) == 3
    assert len(Program().play("F" * (MAX_FORWARDS + 1)).end()) == 2


@pytest.mark.parametrize("forwards", ["FF", "Ff", "fF", "ff", "FfF"])
def test_requests_share_no_evaluation(forwards: str) -> None:
    """Whichever of them forget to switch gradients off; each under a span of its own."""
    program = Program()
    for request, forward in enumerate(forwards):
        program.user_span = SpanReference(1, request + 1, sampled=True)
        program.play(forward)
    assert program.end() == [("evaluation", "")] * len(forwards)


def test_a_target_network_is_part_of_the_step() -> None:
    """It runs without gradients between the forward and its backward, under the same span of the user's or none."""
    program = Program().play("FfBO FfBO")
    program.user_span = SpanReference(1, 1, sampled=True)
    assert program.play("FfBO").end() == _steps("FBO", "FBO", "FBO")


def test_stages_under_spans_of_their_own_are_one_step() -> None:
    """A student's forward and its teacher's, without gradients, each in a trace of its own: neither is a request."""
    program, steps = Program(), ["FfBO", "FfBO", "FBO"]
    program.play("FBO")
    for number, step in enumerate(steps):
        for stage, event in enumerate(step):
            program.user_span = SpanReference(10 * number + stage + 1, 1, sampled=True)
            program.play(event)
    assert program.end() == _steps("FBO", "FBO", "FBO", "FBO")


def test_an_episode_of_many_forwards_is_one_step() -> None:
    """Reinforcement learning runs its policy thousands of times before a backward."""
    assert Program().play(("F" * 3000 + "BO") * 2).end() == _steps("FBO", "FBO")


def test_serving_in_evaluation_mode_with_gradients_on() -> None:
    """Each call of a model in evaluation mode is an evaluation, on a thread that has never trained."""
    program = Program()
    for _ in range(3):
        program.machine.forward_begins(program._tick(), grad=True, model=1, training=False)
        program.machine.forward_ends(program._tick())
    assert program.end() == [("evaluation", "")] * 3
    assert [unit.end_ns - unit.start_ns for unit in program.units] == [10] * 3


def test_validation_in_evaluation_mode_is_no_part_of_the_next_step() -> None:
    """Without `no_grad` and without a loader, the mode of the model tells; a teacher in that mode is another model."""
    program, student, teacher = Program(), 1, 2

    def forward(model: int, *, training: bool) -> None:
        program.machine.forward_begins(program._tick(), grad=True, model=model, training=training)
        program.machine.forward_ends(program._tick())

    for _ in range(2):
        forward(teacher, training=False)
        forward(student, training=True)
        program.play("BO")
    for _ in range(3):
        forward(student, training=False)
    forward(student, training=True)
    program.play("BO")
    assert program.end() == [*_steps("FBO", "FBO"), *[("evaluation", "")] * 3, *_steps("FBO")]


@pytest.mark.parametrize(
    ("before", "after", "handed"),
    [
        ("FBO", "FBO", [*_steps("FBO"), ("evaluation", ""), *_steps("FBO")]),
        ("FBO", "f", [*_steps("FBO"), ("evaluation", ""), ("evaluation", "")]),
        ("FB", "FBO", [("evaluation", ""), *_steps("FBFBO")]),
        ("D", "FBO", _steps("DFBO")),
    ],
)
def test_a_failed_forward_is_no_part_of_the_next_step(before: str, after: str, handed: list[tuple[str, str]]) -> None:
    """Its error is not that step's; only the same fetched batch may be tried again in one step."""
    program = Program().play(before)
    program.machine.forward_begins(program._tick(), grad=True)
    program.machine.forward_ends(program._tick(), Error("OutOfMemoryError", "no memory"))
    assert sorted(program.play(after).end()) == sorted(handed)
    assert [unit.error is not None for unit in program.units if unit.kind == "step"][-1] == (before == "D")


def test_a_fetch_that_failed_is_handed_over() -> None:
    """With its error: the program may end there."""
    handed: list[StepSegment] = []
    machine = StepDetector(Listener(lambda _, parts: handed.extend(parts)))
    machine.fetch_failed(10, 20, Error("ValueError", "no file"))
    (part,) = handed
    assert (part.start_ns, part.end_ns, part.error) == (10, 20, Error("ValueError", "no file"))


def test_parameters_updated_by_hand() -> None:
    """Without any optimizer each backward is a step, after the first 64 retroactively."""
    program = Program().play("DFB" * (WITHOUT_OPTIMIZER - 1))
    assert program.handed == []
    program.play("DFB DFB")
    assert program.handed == _steps(*["DFB"] * WITHOUT_OPTIMIZER)
    assert program.end() == _steps(*["DFB"] * (WITHOUT_OPTIMIZER + 1))


def test_a_new_optimizer_for_each_update() -> None:
    """Each update is a step, which is known after more optimizers than a turn has; all steps have ids of their own."""
    handed: list[list[StepSegment]] = []
    machine = StepDetector(Listener(lambda _, parts: handed.append(parts)))
    for now in range(MAX_OPTIMIZERS + 1):
        machine.forward_begins(now, grad=True)
        machine.forward_ends(now)
        for accumulated in range(2):
            machine.backward_begins(now + accumulated, in_forward=False)
            machine.backward_ends(now + accumulated)
        machine.optimizer_begins(now, now, "SGD")
        machine.optimizer_ends(now, now)
        assert len(handed) == (MAX_OPTIMIZERS if now == MAX_OPTIMIZERS else 0)
    assert len({id(parts[0].identity) for parts in handed}) == MAX_OPTIMIZERS


def test_tensors_updated_by_hand() -> None:
    """Without any module, too, each backward is a step; two of one forward stay one."""
    assert Program().play("B" * (WITHOUT_OPTIMIZER + 1)).end() == _steps(*["B"] * (WITHOUT_OPTIMIZER + 1))
    assert Program().play("FBB" * WITHOUT_OPTIMIZER).end() == _steps(*["FBB"] * WITHOUT_OPTIMIZER)


def test_backwards_of_tensors_accumulate_until_the_optimizer_steps() -> None:
    """They are one step, as those of modules are."""
    assert Program().play("BBBO BBBO DBBO .").end() == _steps("BBBO", "BBBO", "DBBO")


def test_steps_updated_by_hand_keep_their_ids() -> None:
    """Those that are open when it is found out belong to no step that has been handed over."""
    handed: list[StepSegment] = []
    machine = StepDetector(Listener(lambda _, parts: handed.extend(parts)))
    for now in range(WITHOUT_OPTIMIZER):
        part = machine.forward_begins(now, grad=True)
        machine.forward_ends(now)
        machine.backward_begins(now, in_forward=False)
        machine.backward_ends(now)
    assert len(handed) == WITHOUT_OPTIMIZER - 1
    assert all(one.identity is not part.identity for one in handed)


def test_what_was_handed_over_amid_a_backward_changes_no_more() -> None:
    """The worker makes a record of it at some later time, and the backward goes on; so does an optimizer's step."""
    handed: list[StepSegment] = []
    machine = StepDetector(Listener(lambda _, parts: handed.extend(parts)))
    machine.forward_begins(10, grad=True)
    machine.forward_ends(20)
    machine.backward_begins(30, in_forward=False)
    machine.optimizer_begins(40, "O", "SGD")
    machine.end()
    machine.optimizer_ends(50, "O")
    machine.backward_ends(60)
    (part,) = handed
    assert [(phase.kind, phase.end_ns) for phase in part.phases] == [
        ("forward", 30),
        ("backward", 30),
        ("optimizer", 40),
    ]
    assert (part.end_ns, part.optimizers) == (20, [])


def test_a_short_program_without_optimizer() -> None:
    """A program that ends before 64 backwards still has one step for each."""
    assert Program().play("FB FB FB").end() == _steps("FB", "FB", "FB")


def test_accumulation_beyond_64_batches() -> None:
    """Once an optimizer has stepped, as many backwards as it takes belong to one step."""
    events = "DFB" * 99 + "DFBO"
    assert Program().play(events * 3).end()[-2:] == _steps("DFB" * 99 + "DFBO", "DFB" * 99 + "DFBO")


def test_a_finished_step_is_handed_over_at_flush() -> None:
    """Flush hands over what the optimizer has finished, and leaves what is under way."""
    program = Program().play("DFBO")
    program.machine.hand_over_finished()
    assert program.handed == _steps("DFBO")
    program.play("DF")
    program.machine.hand_over_finished()
    assert program.play("BO").end() == _steps("DFBO", "DFBO")


def test_a_loader_that_is_only_read_makes_nothing() -> None:
    """Fetches that no forward follows are dropped at the iterator's end."""
    assert Program().play("DDDDD. DFBO").end() == _steps("DFBO")


def test_what_was_fetched_ahead_of_the_iterators_end_is_the_steps() -> None:
    """Trainer fetches all batches of its last update, and looks for one more, before it forwards the first."""
    program = Program().play("DDDFBFBO DD. FBFBO")
    assert program.end() == _steps("DDDFBFBO", "DDFBFBO")
    assert program.times[1][0] == 170  # the first fetch's start


@pytest.mark.parametrize("events", ["DDDD. FBO FBO", "DDDD. FBFBO FBFBO", "DD. ff FBO", "DD. f FBO"])
def test_a_loader_that_was_read_ahead_of_training_begins_no_step(events: str) -> None:
    """More batches than the first update forwards, or an evaluation since: the step begins with its own forward."""
    program = Program().play(events)
    handed = program.end()
    assert not any("D" in phases for _, phases in handed)
    forward = 10 * (2 * events.count("D") + 1)
    assert program.times[0][0] == forward


@pytest.mark.parametrize("events", ["DDD. FBFBO", "D. FBFBO", "DD. F[O]"])
def test_what_was_fetched_ahead_may_hold_the_iterators_making(events: str) -> None:
    """The making of the iterator is a fetch too, and one batch may have come with the update before."""
    program = Program().play(events)
    assert program.end() == _steps(events.replace(". ", "").replace("[O]", "BO"))
    assert program.times[0][0] == 10


def test_a_validation_takes_in_no_fetches_of_another_iterator() -> None:
    """What was only read stays dropped: a request may be served by the forward, hours later."""
    assert Program().play("DD. f").end() == [("evaluation", "")]


def test_nested_optimizers_count_once() -> None:
    """A wrapper's step around the optimizer's own is one optimizer step."""
    assert Program().play("FB(P) FB(P)").end() == _steps("FBO", "FBO")


def test_a_backward_inside_a_forward_confirms_nothing() -> None:
    """Forces by `autograd.grad` inside the forward are part of it: without more it stays an evaluation."""
    program = Program()
    machine = program.machine
    machine.forward_begins(10, grad=True)
    machine.backward_begins(20, in_forward=True)
    machine.backward_ends(30, in_forward=True)
    machine.forward_ends(40)
    assert program.end() == [("evaluation", "B")]


def test_an_optimizer_that_raised_does_not_swallow_the_next_step() -> None:
    """An optimizer step that never ended is closed by the next event, and the program goes on."""
    program = Program().play("FB(")
    program.machine.close_unfinished_optimizers(100)
    program.now = 100
    assert program.play("FBO FBO").end() == _steps("FBOFBO", "FBO")
