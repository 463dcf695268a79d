"""Find training steps and evaluations among four kinds of events: fetch, forward, backward, optimizer step.

The detector imports neither torch nor a clock: each event brings its time. One detector serves one thread. The
documentation has the rule and a table of programs; `tests/capture/test_step_detector.py` tests every row.
"""

from collections.abc import Hashable

from torchotel._records import Error, Phase
from torchotel.capture.step_assembler import StepAssembler, StepListener
from torchotel.capture.step_segment import Identity, StepSegment, new_phase

WITHOUT_OPTIMIZER = 64  # backwards without an optimizer after which each counts as a step of its own
MAX_OPTIMIZERS = 64  # that step in turns; if there are more, each update has a new one and is a step
MAX_FORWARDS = 1 << 16  # of a segment on a thread that never trained: it serves, and an evaluation is handed over
EPISODE_FORWARDS = 8  # before a backward: after so many, further ones before the next backward are not observed
MAX_FETCHES = 1024  # kept of a segment that only fetches
IN_BACKWARD = "in backward"  # stands for all optimizers that step inside a backward


class StepDetector:
    """Group the events of one thread into steps and evaluations.

    Args:
        listener: Gets the segments of the steps and evaluations.
    """

    def __init__(self, listener: StepListener) -> None:
        self._assembler = StepAssembler(listener)
        self.running: list[tuple[StepSegment, int]] = []
        """Backwards that have begun and not ended, each with its phase's index."""
        self.stepping: list[tuple[Hashable, str, int, StepSegment, int]] = []
        """Optimizers' steps that have begun and not ended, each with its kind, start, segment and phase index."""
        self._stepped_in_backward = False
        self._backwards = self._most_backwards = 0  # since the last optimizer step; the most so far
        self._has_episodes = False  # so many forwards came before the last backward
        self._optimizer_seen = False
        self._tuned: set[int] = set()  # `id()`s of models that ran in evaluation mode before a backward
        self._ahead: StepSegment | None = None
        """A segment that only fetched before its iterator ended; None after a fetch or an evaluation."""
        self._fetch_error: Error | None = None
        """The error of the last fetch that raised."""

    # ---- events

    def fetched(self, start_ns: int, end_ns: int) -> None:
        """Record a fetch that yielded."""
        segment, self._ahead = self._assembler.open, None
        inside = self._inside()
        if segment is None or self._fetch_opens(segment):
            self._assembler.close_open()
            if self._assembler.is_finished():
                self._assembler.hand_over()
            segment = self._assembler.begin(start_ns, fetched=True)
        elif len(segment.phases) >= MAX_FETCHES and not inside:
            del segment.phases[0]
            segment.start_ns = segment.phases[0].start_ns
        segment.phases.append(Phase("data", start_ns, end_ns))
        segment.end_ns = end_ns

    def fetch_failed(self, start_ns: int, end_ns: int, error: Error | None) -> None:
        """Record a fetch that raised; it is handed over, since no step may follow that could show the error."""
        self._fetch_error = error
        self._assembler.fetch_ended(start_ns, end_ns, error)

    def iterator_ended(self, start_ns: int = 0, end_ns: int = 0) -> None:
        """Record a fetch that found its iterator at the end."""
        segment = self._assembler.open
        if segment is not None and not segment.trained and not self._inside():
            self._assembler.close_open()
            if segment.only_fetched and segment.identity.reference is None:
                self._ahead = segment
        self.hand_over_finished()
        self._assembler.fetch_ended(start_ns, end_ns)

    def forward_begins(self, now_ns: int, *, grad: bool, model: int = 0, training: bool = True) -> StepSegment:
        """Record the start of a root forward; return the segment that it belongs to.

        Args:
            now_ns: When the forward starts.
            grad: Whether gradients are on.
            model: The `id()` of the root module.
            training: Whether the root module is in training mode.
        """
        segment = self._assembler.open
        if segment is not None and (segment.error is not None or (training and model in segment.evaluated)):
            self._end_evaluation(segment)
            segment = self._assembler.open
        if segment is None or not (self.stepping or segment.explicit):
            segment = self._segment_of_forward(now_ns, grad=grad, evaluated=0 if training else model)
        if not training and grad:
            segment.evaluated.add(model)
        if not grad:
            self._ahead = None
            if not segment.explicit:
                self._assembler.give_own_identity(segment)
        if grad:
            self._assembler.align(segment)
        segment.forwards_with_grad += grad  # first, since a signal handler may flush between the two
        segment.forwards += 1
        if segment.forward_start_ns is None:
            segment.forward_start_ns = now_ns
        segment.forward_end_ns = segment.end_ns = now_ns
        return segment

    def forward_ends(self, now_ns: int, error: Error | None = None) -> None:
        """Record the end of a root forward."""
        segment = self._assembler.open
        if segment is None:
            return
        segment.forward_end_ns = segment.end_ns = now_ns
        segment.error = segment.error or error
        if segment.opened_without_grad and not (segment.trained or segment.explicit):
            self._assembler.close_open()

    def backward_begins(self, now_ns: int, *, in_forward: bool) -> StepSegment:
        """Record the start of a run of the autograd engine; return the open segment.

        A run inside a forward is part of that forward.
        """
        segment = self._assembler.open
        if segment is None or (segment.finished and not (self._inside() or in_forward)):
            segment = self._begin_after_step(now_ns)
        elif segment.backwards and not (segment.forwards or self._inside() or in_forward):  # of a loss without modules
            self._assembler.close_open()
            segment = self._assembler.begin(now_ns)
        if not (self.running or in_forward):
            self._assembler.align(segment)
            segment.forward_ends(now_ns)
            segment.backwards += 1
            segment.trained = True
            if segment.forwards:  # not the second backward of an actor and its critic
                self._has_episodes = segment.forwards >= EPISODE_FORWARDS
            if segment.evaluated:
                self._tuned |= segment.evaluated
        segment.phases.append(new_phase(Phase, ("backward", now_ns, now_ns, None, None, None, 0)))
        self.running.append((segment, len(segment.phases) - 1))
        return segment

    def backward_ends(
        self, now_ns: int, error: Error | None = None, *, in_forward: bool = False, accumulates: bool = True
    ) -> None:
        """Record the end of a run of the autograd engine.

        Args:
            now_ns: When it ended.
            error: What it raised.
            in_forward: Whether it ran inside a forward.
            accumulates: Whether it adds to the gradients of parameters.
        """
        segment, phase_index = self.running.pop()
        start_ns = segment.phases[phase_index].start_ns
        segment.phases[phase_index] = new_phase(Phase, ("backward", start_ns, now_ns, error, None, None, 0))
        segment.end_ns = now_ns
        segment.error = segment.error or error
        segment.accumulates = segment.accumulates or accumulates
        if self.running or in_forward:
            return
        self._backwards += 1
        if self._stepped_in_backward:
            self._stepped_in_backward = False
            self._optimizer_done(segment, IN_BACKWARD)
        elif not self.stepping and self._backwards >= max(WITHOUT_OPTIMIZER, 2 * self._most_backwards):
            self._assembler.by_hand = True
            self._assembler.hand_over_each()

    def optimizer_begins(self, now_ns: int, key: Hashable, kind: str, *, closure: bool = False) -> StepSegment | None:
        """Record the start of an optimizer's step; return the open segment.

        Nested optimizers (wrappers) count as part of the outermost one.

        Args:
            now_ns: When it starts.
            key: Which optimizer it is.
            kind: The name of its class.
            closure: Whether forward and backward run inside: after a finished step they belong to the next one.
        """
        segment = self._assembler.open
        if (segment is None or key in segment.optimizers or (closure and segment.finished)) and not self._inside():
            segment = self._begin_after_step(now_ns)
        if segment is None:
            return None
        if segment.forward_start_ns is not None and not (self.running or self.stepping):
            segment.forward_ends()
        if not self.stepping:
            segment.phases.append(new_phase(Phase, ("optimizer", now_ns, now_ns, None, kind, None, 0)))
        self.stepping.append((key, kind, now_ns, segment, len(segment.phases) - 1))
        return segment

    def optimizer_ends(self, now_ns: int, key: Hashable) -> None:
        """Record the end of an optimizer's step, and of nested steps whose failure was not seen."""
        for entry in self.stepping:
            if entry[0] == key:
                break
        else:
            return
        while True:
            found, kind, start_ns, segment, phase_index = self.stepping.pop()
            if found == key:
                break
        if self.stepping:
            return
        if segment.forward_start_ns is not None:
            segment.forward_ends()
        segment.phases[phase_index] = new_phase(Phase, ("optimizer", start_ns, now_ns, None, kind, None, 0))
        segment.end_ns = now_ns
        if self.running:
            self._stepped_in_backward = True
        else:
            self._optimizer_done(segment, key)

    def optimizer_fails(self, now_ns: int, error: Error | None, running: int = 0) -> None:
        """Record that an optimizer's step raised: the training step fails, and is not finished.

        Args:
            now_ns: When it raised.
            error: What it raised.
            running: How many optimizers' steps that enclose it still run; the outermost of them shows how it ends.
        """
        if len(self.stepping) <= running:
            return  # its start was not seen
        _, kind, start_ns, segment, phase_index = self.stepping[running]
        del self.stepping[running:]
        if running:
            return
        segment.forward_ends()
        segment.phases[phase_index] = new_phase(Phase, ("optimizer", start_ns, now_ns, error, kind, None, 0))
        segment.end_ns = now_ns
        segment.error = segment.error or error
        segment.trained = True

    def optimizer_skipped(self, now_ns: int, key: Hashable) -> None:
        """Record a step that GradScaler skipped: it finishes the training step, too."""
        if self._assembler.open is not None and key not in self._assembler.open.optimizers:
            self._assembler.open.end_ns = now_ns
            self._optimizer_done(self._assembler.open, key)

    def step_begins(self, now_ns: int) -> StepSegment:
        """Record the start of an explicit step and return its segment, which includes the fetch just before it."""
        self._ahead = None
        if self._assembler.open is not None and not self._assembler.open.only_fetched:
            self._assembler.close_open()
        if self._assembler.segments:
            self._assembler.hand_over()
            if self._assembler.open is not None:
                self._assembler.open.identity = Identity()
        segment = self._assembler.open or self._assembler.begin(now_ns)
        segment.explicit = True
        return segment

    def step_ends(self, now_ns: int, error: Error | None) -> None:
        """Record the end of an explicit step."""
        segment = self._assembler.open
        if segment is None or not segment.explicit:
            return  # closed by `end`
        self.close_unfinished_optimizers(now_ns)
        segment.end_ns, segment.error = max(segment.end_ns, now_ns), segment.error or error
        segment.forward_ends()
        self._assembler.close_open()
        self._assembler.hand_over()

    # ---- hand-over

    def hand_over_finished(self) -> None:
        """Hand over the finished step, and an evaluation that waits for the next fetch."""
        segment = self._assembler.open
        if self._inside():
            return
        if segment is not None and segment.evaluates:
            self._assembler.close_open()
        if self._assembler.is_finished() or (self._assembler.open is not None and self._assembler.open.finished):
            self._assembler.close_open()
            self._assembler.hand_over()

    @property
    def segments(self) -> list[StepSegment]:
        """The segments of the step that is not handed over yet, in order; the open one, if any, is the last."""
        return (
            self._assembler.segments
            if self._assembler.open is None
            else [*self._assembler.segments, self._assembler.open]
        )

    @property
    def open_segment(self) -> StepSegment | None:
        """The open segment, else the last segment of a step that waits to be handed over."""
        return self._assembler.open or (self._assembler.segments[-1] if self._assembler.segments else None)

    @property
    def is_episode(self) -> bool:
        """Whether the open segment has run so many forwards with gradients, and nothing else, as one that trained."""
        segment = self._assembler.open
        return (
            self._has_episodes
            and segment is not None
            and EPISODE_FORWARDS <= segment.forwards == segment.forwards_with_grad
            and not (segment.trained or segment.evaluated or segment.error or self.stepping)
            and all(phase.kind == "data" for phase in segment.phases)  # no backward inside a forward
        )

    def current(self, fetch_start_ns: int | None) -> tuple[Identity, int] | None:
        """Return the identity and the start of the current step or evaluation; None if there is none.

        Args:
            fetch_start_ns: Start of the running fetch, None for none; the segment that it will open is current already.
        """
        segment = self._assembler.open
        if fetch_start_ns is None or not (segment is None or self._fetch_opens(segment)):
            return (
                None
                if segment is None
                else (segment.identity, segment.start_ns if segment.evaluates else segment.step_start_ns)
            )
        trained = (
            [*self._assembler.segments, segment]
            if segment is not None and segment.trained
            else self._assembler.segments
        )
        if trained and not trained[-1].finished:
            return trained[-1].identity, trained[0].step_start_ns
        return self._assembler.next, self._assembler.step_start_ns(fetch_start_ns)

    @property
    def in_step(self) -> bool:
        """Whether anything is open or waits to be handed over."""
        return self._assembler.open is not None or bool(self._assembler.segments)

    def close_unfinished_optimizers(self, now_ns: int) -> None:
        """Close optimizer steps that raised without a call of `optimizer_fails`."""
        if self.stepping:
            _, kind, start_ns, segment, phase_index = self.stepping[0]
            segment.phases[phase_index] = Phase("optimizer", start_ns, now_ns, None, kind, estimated="end")
            self.stepping.clear()

    def close_unfinished_backwards(self, now_ns: int) -> None:
        """Close backwards that ended without a call of `backward_ends`."""
        if self.running:
            segment, phase_index = self.running[0]
            start_ns = segment.phases[phase_index].start_ns
            segment.phases[phase_index] = Phase("backward", start_ns, now_ns, estimated="end")
            self.running.clear()
            self._stepped_in_backward = False

    def end(self, error: Error | None = None) -> None:
        """Hand over everything, finished or not, when capture ends or pauses; later events do not change it.

        Args:
            error: The exception that ended the run.
        """
        if error is not None and self._assembler.open is not None and error != self._fetch_error:
            self._interrupt(self._assembler.open, error)
        self.running = [(segment.copy(), phase_index) for segment, phase_index in self.running]
        self.stepping = [
            (key, kind, start_ns, segment.copy(), phase_index)
            for key, kind, start_ns, segment, phase_index in self.stepping
        ]
        failed = self._assembler.open if error is not None and self._assembler.is_finished() else None
        if failed is not None and not (failed.trained or self._assembler.shares_identity(failed)):
            self._assembler.hand_over()  # first, since the failed forward has the number of the next step
        self._assembler.close_open()
        if not self._optimizer_seen:
            self._assembler.hand_over_each()
        elif any(
            segment.accumulates or segment.finished or segment.explicit or segment.error
            for segment in self._assembler.segments
        ):
            self._assembler.hand_over()
        else:
            self._assembler.emit_as_evaluations()
        self._assembler.paused = True

    # ---- the rule

    def _segment_of_forward(self, now_ns: int, *, grad: bool, evaluated: int) -> StepSegment:
        segment = self._assembler.open
        if segment is None or segment.finished:
            if grad:
                return self._begin_after_step(now_ns)
            self._assembler.close_open()
            segment = self._assembler.begin(now_ns)
            segment.opened_without_grad = True
        elif (
            (grad and segment.backwards)
            or ((grad or not self._has_trained()) and self._is_another_evaluation(segment, evaluated))
            or (not grad and self._only_requests(segment))
        ):
            self._assembler.close_open()
            segment = self._assembler.begin(now_ns)
            segment.opened_without_grad = not grad
        return segment

    def _interrupt(self, segment: StepSegment, error: Error) -> None:
        """Mark the open segment as failed, unless it is whole: the run ends before its next event.

        A forward that no backward follows is part of the step that accumulates. Gradients that are not accumulated may
        be computed after the last step, such as by `torch.func.jacrev`.
        """
        only_gradients = segment.backwards > 0 and not segment.accumulates
        if segment.finished or only_gradients or segment.only_fetched or self._only_requests(segment):
            return
        segment.error = segment.error or error
        trains = segment.trains or bool(segment.evaluated & self._tuned)
        if trains and self._optimizer_seen and self._assembler.shares_identity(segment):
            segment.trained = True

    def _end_evaluation(self, segment: StepSegment) -> None:
        """Close a segment that no backward follows: its model trains again, or its only forward failed.

        After a fetch, the program may retry a failed forward with the same batch.
        """
        continues = segment.trained or segment.explicit or self.stepping
        if (
            segment.forwards
            and not continues
            and (segment.error is None or (segment.forwards == 1 and not segment.fetched))
        ):
            self._assembler.close_open()

    def _prepend_fetches(self, segment: StepSegment, ahead: StepSegment) -> None:
        """Add the fetches before the iterator's end to a step, as Trainer fetches if it accumulates.

        If more was fetched than the step's forwards and the iterator's making, the program only read the loader.
        """
        if self._inside():  # running events know their phases by index
            return
        self._ahead = None
        segments = [*self._assembler.segments, segment]
        first = next(one for one in segments if one.start_ns >= ahead.end_ns)
        forwards = sum(one.forwards_with_grad for one in segments)
        if len(ahead.phases) <= forwards + 1 and ahead.user_span == first.user_span:
            first.phases, first.start_ns = ahead.phases + first.phases, ahead.start_ns

    def _is_another_evaluation(self, segment: StepSegment, evaluated: int) -> bool:
        """Return whether a forward begins another evaluation than the open segment, which only runs forwards.

        Args:
            segment: The open segment.
            evaluated: The `id()` of the model that runs, if it is in evaluation mode: each of its calls is a request,
                unless a fetch separates batches, or a model trains.
        """
        if not segment.forwards:
            return False
        user_span, own = self._assembler.listener.user_span(), segment.identity.reference
        inside = user_span is not None and own is not None and user_span.trace_id == own.trace_id
        if segment.forwards >= MAX_FORWARDS and not self._has_trained():
            return True
        repeats = evaluated in segment.evaluated and not (segment.fetched or segment.trains or evaluated in self._tuned)
        return repeats or not (inside or segment.user_span == user_span)

    def _only_requests(self, segment: StepSegment) -> bool:
        """Return whether a segment is calls in evaluation mode with gradients on: a forward without them ends it."""
        only_evaluates = bool(segment.evaluated) and not (segment.trains or segment.backwards or segment.fetched)
        return only_evaluates and not (segment.evaluated & self._tuned)

    def _has_trained(self) -> bool:
        """Return whether a backward ran or an optimizer stepped on this thread: it does not serve requests."""
        return self._optimizer_seen or self._backwards > 0

    def _begin_after_step(self, now_ns: int) -> StepSegment:
        """Open a segment by another event than a fetch, after a finished segment or as the first one.

        With one optimizer and no fetch the step has ended. Otherwise the segment may still belong to it (a GAN's
        second network): the next optimizer step or fetch decides. Until then it shares the step's ids, unless all
        optimizers of a step have stepped.
        """
        assembler = self._assembler
        assembler.close_open()
        if assembler.is_finished() and assembler.has_one_optimizer() and not assembler.has_fetch():
            assembler.hand_over()
        segment = assembler.begin(now_ns)
        if assembler.segments and assembler.is_finished():
            if not assembler.is_whole():
                segment.identity, segment.alignment = assembler.segments[-1].identity, assembler.segments[-1].alignment
            elif not assembler.continues_until_fetch():
                segment.ahead = 1
        return segment

    def _optimizer_done(self, segment: StepSegment, key: Hashable) -> None:
        if self._ahead is not None:
            self._prepend_fetches(segment, self._ahead)
        self._optimizer_seen, self._assembler.by_hand = True, False
        self._most_backwards = max(self._most_backwards, self._backwards)
        self._backwards = 0
        earlier = self._assembler.segments
        repeats = bool(earlier) and any(key in segment.optimizers for segment in earlier)
        segment.trained = segment.finished = True
        segment.optimizers.append(key)
        if self._assembler.has_fetch():
            if repeats and self._assembler.has_one_optimizer():
                self._assembler.hand_over_before(key)
        elif repeats or self._assembler.ends_update(key):
            self._assembler.hand_over_before(key)
        elif self._assembler.n_updates() >= MAX_OPTIMIZERS:
            self._assembler.hand_over_updates()

    def _inside(self) -> bool:
        """Return whether a backward or an optimizer's step runs, or an explicit step is open."""
        explicit = self._assembler.open is not None and self._assembler.open.explicit
        return explicit or bool(self.running or self.stepping)

    def _fetch_opens(self, segment: StepSegment) -> bool:
        """Return whether a fetch that yields opens a new segment."""
        return not (self._inside() or segment.only_fetched)
