"""Find training steps and evaluations among four kinds of events: fetch, forward, backward, optimizer step.

Knows neither torch nor the clock: each event brings its time. One machine serves one thread. The rule and the
programs that it must get right are tabled in the documentation; `tests/capture/test_step_detector.py` holds every row.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace

from torchotel._records import Baggage, Error, Phase, SpanReference
from torchotel.capture.step_assembler import StepAssembler
from torchotel.capture.step_segment import Identity, StepSegment, new_phase

WITHOUT_OPTIMIZER = 64  # backwards without an optimizer after which each counts as a step of its own
MAX_FORWARDS = 1 << 16  # of a part on a thread that has never trained: it serves, and hands over an evaluation then
MAX_FETCHES = 1024  # fetches that a step which only fetches keeps
IN_BACKWARD = "in backward"  # stands for all optimizers that step inside a backward


class StepDetector:
    """Group the events of one thread into steps and evaluations.

    Args:
        take: Moves what was recorded since the last call into the part that ends.
        emit: Gets "step" or "evaluation" and its parts, in order.
        user_span: Answers with the user's span that is current.
        begins: Called when something new opens: what was handed over before has had its last word.
        baggage: Returns the program's baggage, None if it is empty.
    """

    def __init__(
        self,
        take: Callable[[StepSegment], None],
        emit: Callable[[str, list[StepSegment]], None],
        user_span: Callable[[], SpanReference | None],
        begins: Callable[[], None] = lambda: None,
        baggage: Callable[[], Baggage | None] = lambda: None,
    ) -> None:
        self._pending = StepAssembler(take, emit, user_span, begins, baggage)
        self._running: list[tuple[StepSegment, int]] = []  # backwards that run, each with its phase's place
        self.stepping: list[tuple[Hashable, str, int, StepSegment, int]] = []
        """Optimizers' steps that have begun and not ended, each with its kind, its start and its phase's place."""
        self._stepped_in_backward = False
        self._backwards = self._most_backwards = 0  # since the last optimizer step; the most so far
        self._optimizer_seen = False
        self._tuned: set[int] = set()  # `id()`s of models that ran in evaluation mode before a backward
        self._ahead: StepSegment | None = None  # only fetched when its iterator ended; no fetch or evaluation since

    # ---- events

    def iterator_made(self, start_ns: int, end_ns: int) -> None:
        """Take in the making of a DataLoader's iterator: data time of the step that its first fetch opens."""
        self.fetched(start_ns, end_ns)

    def fetched(self, start_ns: int, end_ns: int) -> None:
        """Take in a fetch that yielded."""
        part, self._ahead = self._pending.open, None
        inside = self._inside()
        if part is None or self._fetch_opens(part):
            self._pending.close_open()
            if self._pending.is_finished():
                self._pending.hand_over()
            part = self._pending.begin(start_ns, fetched=True)
        elif len(part.phases) >= MAX_FETCHES and not inside:
            del part.phases[0]
            part.start_ns = part.phases[0].start_ns
        part.phases.append(Phase("data", start_ns, end_ns))
        part.end_ns = end_ns

    def fetch_failed(self, start_ns: int, end_ns: int, error: Error | None) -> None:
        """Take in a fetch that raised: it is handed over, since no step may follow that could show the error."""
        self._pending.fetch_ended(start_ns, end_ns, error)

    def iterator_ended(self, start_ns: int = 0, end_ns: int = 0) -> None:
        """Take in a fetch that found its iterator at the end."""
        part = self._pending.open
        if part is not None and not part.trained and not self._inside():
            self._pending.close_open()
            if _only_fetched(part) and part.identity.reference is None:
                self._ahead = part
        self.hand_over_finished()
        self._pending.fetch_ended(start_ns, end_ns)

    def forward_begins(self, now_ns: int, *, grad: bool, model: int = 0, training: bool = True) -> StepSegment:
        """Take in the start of an outermost forward; return the part that it belongs to.

        Args:
            now_ns: When it starts.
            grad: Whether gradients are on.
            model: The `id()` of the outermost module.
            training: Whether that is in training mode.
        """
        part = self._pending.open
        if part is not None and (part.error is not None or (training and model in part.evaluated)):
            self._end_evaluation(part)
            part = self._pending.open
        if part is None or not (self.stepping or part.explicit):
            part = self._part_of_forward(now_ns, grad=grad, evaluated=0 if training else model)
        if not training and grad:
            part.evaluated.add(model)
        if not grad:
            self._ahead = None
            if not part.explicit:
                self._pending.keep_apart(part)
        part.forwards += 1
        part.forwards_with_grad += grad
        if part.forward_start_ns is None:
            part.forward_start_ns = now_ns
        part.forward_end_ns = part.end_ns = now_ns
        return part

    def forward_ends(self, now_ns: int, error: Error | None = None) -> None:
        """Take in the end of an outermost forward."""
        part = self._pending.open
        if part is None:
            return
        part.forward_end_ns = part.end_ns = now_ns
        part.error = part.error or error
        if part.opened_without_grad and not (part.trained or part.explicit):
            self._pending.close_open()

    def backward_begins(self, now_ns: int, *, in_forward: bool) -> StepSegment:
        """Take in the start of a run of the autograd engine; return what is open.

        One inside a forward is part of that forward.
        """
        part = self._pending.open
        if part is None or (part.finished and not (self._inside() or in_forward)):
            part = self._begin_after_step(now_ns)
        elif part.backwards and not (part.forwards or self._inside() or in_forward):  # of a loss without modules
            self._pending.close_open()
            part = self._pending.begin(now_ns)
        if not (self._running or in_forward):
            part.forward_ends(now_ns)
            part.backwards += 1
            part.trained = True
            if part.evaluated:
                self._tuned |= part.evaluated
        self._running.append((part, len(part.phases)))
        part.phases.append(new_phase(Phase, ("backward", now_ns, now_ns, None, None, None, 0)))
        return part

    def backward_ends(
        self, now_ns: int, error: Error | None = None, *, in_forward: bool = False, accumulates: bool = True
    ) -> None:
        """Take in the end of a run of the autograd engine.

        Args:
            now_ns: When it ended.
            error: What it raised.
            in_forward: Whether it ran inside a forward.
            accumulates: Whether it adds to the gradients of parameters.
        """
        part, place = self._running.pop()
        start_ns = part.phases[place].start_ns
        part.phases[place] = new_phase(Phase, ("backward", start_ns, now_ns, error, None, None, 0))
        part.end_ns = now_ns
        part.error = part.error or error
        part.accumulates = part.accumulates or accumulates
        if self._running or in_forward:
            return
        self._backwards += 1
        if self._stepped_in_backward:
            self._stepped_in_backward = False
            self._optimizer_done(part, IN_BACKWARD)
        elif not self.stepping and self._backwards >= max(WITHOUT_OPTIMIZER, 2 * self._most_backwards):
            self._pending.by_hand = True
            self._pending.hand_over_each()

    def optimizer_begins(self, now_ns: int, key: Hashable, kind: str, *, closure: bool = False) -> StepSegment | None:
        """Take in the start of an optimizer's step; return what is open.

        Nested ones (wrappers) count with the outermost.

        Args:
            now_ns: When it starts.
            key: Which optimizer it is.
            kind: The name of its class.
            closure: Whether forward and backward run inside, as those of the next step do where one is finished.
        """
        part = self._pending.open
        if (part is None or key in part.optimizers or (closure and part.finished)) and not self._inside():
            part = self._begin_after_step(now_ns)
        if part is None:
            return None
        if part.forward_start_ns is not None and not (self._running or self.stepping):
            part.forward_ends()
        self.stepping.append((key, kind, now_ns, part, len(part.phases)))
        if len(self.stepping) == 1:
            part.phases.append(new_phase(Phase, ("optimizer", now_ns, now_ns, None, kind, None, 0)))
        return part

    def optimizer_ends(self, now_ns: int, key: Hashable) -> None:
        """Take in the end of an optimizer's step, and of those in it whose failure was not seen."""
        for entry in self.stepping:
            if entry[0] == key:
                break
        else:
            return
        while True:
            found, kind, start_ns, part, place = self.stepping.pop()
            if found == key:
                break
        if self.stepping:
            return
        if part.forward_start_ns is not None:
            part.forward_ends()
        part.phases[place] = new_phase(Phase, ("optimizer", start_ns, now_ns, None, kind, None, 0))
        part.end_ns = now_ns
        if self._running:
            self._stepped_in_backward = True
        else:
            self._optimizer_done(part, key)

    def optimizer_fails(self, now_ns: int, error: Error | None, running: int = 0) -> None:
        """Take in that an optimizer's step raised: the training step fails, and is not finished.

        Args:
            now_ns: When it raised.
            error: What it raised.
            running: How many steps go on, in which it ran. The outermost of them shows how it ends.
        """
        if len(self.stepping) <= running:
            return  # its start was not seen
        _, kind, start_ns, part, place = self.stepping[running]
        del self.stepping[running:]
        if running:
            return
        part.forward_ends()
        part.phases[place] = new_phase(Phase, ("optimizer", start_ns, now_ns, error, kind, None, 0))
        part.end_ns = now_ns
        part.error = part.error or error
        part.trained = True

    def optimizer_skipped(self, now_ns: int, key: Hashable) -> None:
        """Take in a step that GradScaler left out: it finishes the training step all the same."""
        if self._pending.open is not None and key not in self._pending.open.optimizers:
            self._pending.open.end_ns = now_ns
            self._optimizer_done(self._pending.open, key)

    def step_begins(self, now_ns: int) -> StepSegment:
        """Take in the start of an explicit step, and return it; it takes in the fetch just before it."""
        self._ahead = None
        if self._pending.open is not None and not _only_fetched(self._pending.open):
            self._pending.close_open()
        if self._pending.parts:
            self._pending.hand_over()
            if self._pending.open is not None:
                self._pending.open.identity = Identity()
        part = self._pending.open or self._pending.begin(now_ns)
        part.explicit = True
        return part

    def step_ends(self, now_ns: int, error: Error | None) -> None:
        """Take in the end of an explicit step."""
        part = self._pending.open
        if part is None or not part.explicit:
            return  # closed by `end`
        self.abandon_stepping(now_ns)
        part.end_ns, part.error = max(part.end_ns, now_ns), part.error or error
        part.forward_ends()
        self._pending.close_open()
        self._pending.hand_over()

    # ---- hand-over

    def hand_over_finished(self) -> None:
        """Hand over the step that its optimizer has finished, and an evaluation that waits for its next fetch."""
        part = self._pending.open
        if self._inside():
            return
        if part is not None and part.evaluates:
            self._pending.close_open()
        if self._pending.is_finished() or (self._pending.open is not None and self._pending.open.finished):
            self._pending.close_open()
            self._pending.hand_over()

    @property
    def parts(self) -> list[StepSegment]:
        """The parts of the step that is not handed over yet, in order; the last is the open one, if there is one."""
        return self._pending.parts if self._pending.open is None else [*self._pending.parts, self._pending.open]

    @property
    def open_part(self) -> StepSegment | None:
        """What is open, else the last part of a step that waits to be handed over."""
        return self._pending.open or (self._pending.parts[-1] if self._pending.parts else None)

    @property
    def forwarding(self) -> StepSegment | None:
        """The open part while a further forward with gradients only adds to it: as yet it does nothing but forward."""
        part = self._pending.open
        if part is None or part.forward_start_ns is None or part.trained or part.error or self.stepping:
            return None
        return part if part.forwards % MAX_FORWARDS else None

    def current(self, fetch_start_ns: int | None) -> tuple[Identity, int] | None:
        """Return the identity and the start of what is current; None for nothing.

        Args:
            fetch_start_ns: Start of the fetch that runs, if one does: what it will open is current already.
        """
        part = self._pending.open
        if fetch_start_ns is None or not (part is None or self._fetch_opens(part)):
            return None if part is None else (part.identity, part.start_ns if part.evaluates else part.step_start_ns)
        trained = [*self._pending.parts, part] if part is not None and part.trained else self._pending.parts
        if trained and not trained[-1].finished:
            return trained[-1].identity, trained[0].step_start_ns
        return self._pending.next, self._pending.step_start_ns(fetch_start_ns)

    @property
    def in_step(self) -> bool:
        """Whether anything is open or waits to be handed over."""
        return self._pending.open is not None or bool(self._pending.parts)

    def abandon_stepping(self, now_ns: int) -> None:
        """Close optimizer steps that raised where `optimizer_fails` was not called."""
        if self.stepping:
            _, kind, start_ns, part, place = self.stepping[0]
            part.phases[place] = Phase("optimizer", start_ns, now_ns, None, kind, estimated="end")
            self.stepping.clear()

    def end(self) -> None:
        """Hand over everything, finished or not, as capture ends or pauses; what runs still changes nothing of it."""
        self._running = [(_copy_of(part), place) for part, place in self._running]
        self.stepping = [(key, kind, start_ns, _copy_of(part), at) for key, kind, start_ns, part, at in self.stepping]
        self._pending.close_open()
        if not self._optimizer_seen:
            self._pending.hand_over_each()
        elif any(part.accumulates or part.finished or part.explicit or part.error for part in self._pending.parts):
            self._pending.hand_over()
        else:
            self._pending.set_aside()
        self._pending.paused = True

    # ---- the rule

    def _part_of_forward(self, now_ns: int, *, grad: bool, evaluated: int) -> StepSegment:
        part = self._pending.open
        if part is None or part.finished:
            if grad:
                return self._begin_after_step(now_ns)
            self._pending.close_open()
            part = self._pending.begin(now_ns)
            part.opened_without_grad = True
        elif (grad and part.backwards) or (
            (grad or not self._has_trained()) and self._is_another_evaluation(part, evaluated)
        ):
            self._pending.close_open()
            part = self._pending.begin(now_ns)
            part.opened_without_grad = not grad
        return part

    def _end_evaluation(self, part: StepSegment) -> None:
        """Close a part that no backward follows: its model trains again, or its only forward failed.

        After a fetch, a forward that failed may be tried again with the same batch.
        """
        goes_on = part.trained or part.explicit or self.stepping
        if part.forwards and not goes_on and (part.error is None or (part.forwards == 1 and not part.fetched)):
            self._pending.close_open()

    def _take_in_ahead(self, part: StepSegment, ahead: StepSegment) -> None:
        """Give a step what was fetched for it before its iterator ended, as Trainer does where it accumulates.

        More than it forwarded, and the iterator's making, was fetched for more than this step: a loader was only read.
        """
        if self._inside():  # what is inside knows its phases by their places
            return
        self._ahead = None
        parts = [*self._pending.parts, part]
        first = next(one for one in parts if one.start_ns >= ahead.end_ns)
        forwards = sum(one.forwards_with_grad for one in parts)
        if len(ahead.phases) <= forwards + 1 and ahead.user_span == first.user_span:
            first.phases, first.start_ns = ahead.phases + first.phases, ahead.start_ns

    def _is_another_evaluation(self, part: StepSegment, evaluated: int) -> bool:
        """Tell whether a part that only forwards belongs to another request, or to one that serves for ever.

        Args:
            part: The open one.
            evaluated: The `id()` of the model that runs, if it is in evaluation mode: each of its calls is a request,
                unless a fetch tells batches apart, or a model trains.
        """
        if not part.forwards:
            return False
        user_span, own = self._pending.user_span(), part.identity.reference
        inside = user_span is not None and own is not None and user_span.trace_id == own.trace_id
        if part.forwards >= MAX_FORWARDS and not self._has_trained():
            return True
        repeats = evaluated in part.evaluated and not (part.fetched or part.trains or evaluated in self._tuned)
        return repeats or not (inside or part.user_span == user_span)

    def _has_trained(self) -> bool:
        """Tell whether a backward ran or an optimizer stepped on this thread: what it runs is not requests."""
        return self._optimizer_seen or self._backwards > 0

    def _begin_after_step(self, now_ns: int) -> StepSegment:
        """Open a part by other than a fetch, after a finished one or at the very first.

        With one optimizer and no fetch the step has ended. Otherwise the part may belong to it still (a GAN's
        second network): the next optimizer step or fetch tells. Until then it shares the step's ids, unless all
        optimizers that make a step have stepped.
        """
        pending = self._pending
        pending.close_open()
        if pending.is_finished() and pending.has_one_optimizer() and not pending.has_fetch():
            pending.hand_over()
        part = pending.begin(now_ns)
        if pending.parts and pending.is_finished():
            if not pending.is_whole():
                part.identity = pending.parts[-1].identity
            elif not pending.goes_on():
                part.ahead = 1
        return part

    def _optimizer_done(self, part: StepSegment, key: Hashable) -> None:
        if self._ahead is not None:
            self._take_in_ahead(part, self._ahead)
        self._optimizer_seen, self._pending.by_hand = True, False
        self._most_backwards = max(self._most_backwards, self._backwards)
        self._backwards = 0
        earlier = self._pending.parts
        repeats = bool(earlier) and any(key in part.optimizers for part in earlier)
        part.optimizers.append(key)
        part.trained = part.finished = True
        if repeats and (self._pending.has_one_optimizer() or not self._pending.has_fetch()):
            last = max(i for i, part in enumerate(earlier) if part.finished)
            step, self._pending.parts = earlier[: last + 1], earlier[last + 1 :]
            self._pending.emit_step(step)

    def _inside(self) -> bool:
        """Tell whether a backward or an optimizer's step runs, or an explicit step is open: they go on."""
        explicit = self._pending.open is not None and self._pending.open.explicit
        return explicit or bool(self._running or self.stepping)

    def _fetch_opens(self, part: StepSegment) -> bool:
        """Tell whether a fetch that yields opens another part than the one that is open."""
        return not (self._inside() or _only_fetched(part))


def _copy_of(part: StepSegment) -> StepSegment:
    return replace(part, phases=[*part.phases], optimizers=[*part.optimizers])


def _only_fetched(part: StepSegment) -> bool:
    return not part.forwards and not part.trained
