"""Assembles steps from segments."""

from collections.abc import Hashable
from typing import Protocol

from torchotel._records import Alignment, Baggage, Error, SpanReference
from torchotel.capture.step_segment import Identity, StepSegment, step_start_ns


class StepListener(Protocol):
    """The interface between the step detector of a thread and its recorder."""

    def user_span(self) -> SpanReference | None:
        """Return the user's span that is current."""

    def baggage(self) -> Baggage | None:
        """Return the program's baggage, None if it is empty."""

    def alignment(self, ahead: int) -> Alignment | None:
        """Return the alignment of a step that begins now; None if there are no other ranks.

        Args:
            ahead: Steps that will end before it.
        """

    def on_segment_begin(self) -> None:
        """Take note that a segment opens: no more values can be logged to the steps before."""

    def on_segment_end(self, segment: StepSegment) -> None:
        """Move the records since the last segment into the segment that ends."""

    def on_record(self, kind: str, segments: list[StepSegment]) -> None:
        """Take over a "step", an "evaluation" or a fetch ("data"), with its segments in order."""


class StepAssembler:
    """Open and close segments, and hand them over as steps and evaluations.

    Args:
        listener: The thread's recorder.
    """

    def __init__(self, listener: StepListener) -> None:
        self.listener = listener
        self.segments: list[StepSegment] = []
        """Closed segments of the step that is not handed over yet."""
        self.open: StepSegment | None = None
        self.next = Identity()
        """The identity of the segment that the running fetch will open."""
        self.cycle: set[Hashable] = set()
        """The optimizers that stepped in the last step."""
        self.turn: tuple[Hashable, ...] = ()
        """The optimizers of the last step in which several stepped, in order; empty: there was none."""
        self.by_hand = False
        """Parameters are updated without a torch optimizer: each segment is a step."""
        self.idle_since_ns = 0
        """End of the last segment of a step, plus the time of evaluations since; 0: there was no step yet."""
        self.paused = False
        """Capture was paused since that end."""

    def has_one_optimizer(self) -> bool:
        """Return whether one optimizer steps once a step; False in the first step of an optimizer: it is unknown."""
        keys = _keys(self.segments if self.open is None else [*self.segments, self.open])
        if len(keys) != 1 or len(self.cycle) > 1:
            return False
        return self._repeats() or (keys == self.cycle and not keys < set(self.turn))

    def _repeats(self) -> bool:
        finished = [segment for segment in (*self.segments, self.open) if segment is not None and segment.finished]
        return len(finished) > 1

    def has_fetch(self) -> bool:
        """Return whether a closed segment began with a fetch."""
        for segment in self.segments:  # noqa: SIM110  # a generator is one more function call at every step
            if segment.fetched:
                return True
        return False

    def is_finished(self) -> bool:
        """Return whether the last closed segment ended with an optimizer's step."""
        return bool(self.segments) and self.segments[-1].finished

    def is_whole(self) -> bool:
        """Return whether all optimizers that stepped in the last step have done so in the closed segments."""
        return len(self.cycle) <= 1 or self.cycle <= _keys(self.segments)

    def continues_until_fetch(self) -> bool:
        """Return whether the step continues after an optimizer's step until the next fetch, as in a GAN."""
        return self.has_fetch() and (bool(self.turn) or not self.cycle)

    def begin(self, now_ns: int, *, fetched: bool = False) -> StepSegment:
        """Open a segment; if it continues a step, it shares the step's ids."""
        listener = self.listener
        listener.on_segment_begin()
        segment = self.open = StepSegment(
            now_ns, now_ns, fetched, user_span=listener.user_span(), baggage=listener.baggage()
        )
        segment.idle_since_ns, segment.paused = self.idle_since_ns, self.paused
        if self.segments and not self.is_finished():
            before = self.segments[-1]
            segment.identity, segment.ahead, segment.alignment = before.identity, before.ahead, before.alignment
        elif fetched:
            segment.identity, self.next = self.next, Identity()
        return segment

    def align(self, segment: StepSegment) -> None:
        """Set the alignment of a segment that begins a step: at its first event that all ranks have.

        A fetch is none: a rank may evaluate between the fetch and the forward that trains.
        """
        if segment.alignment is None:
            segment.alignment = self.listener.alignment(ahead=segment is self.open and bool(self.segments))

    def step_start_ns(self, first_event_ns: int) -> int:
        """Return the start of the step that an event would open."""
        if self.open is not None and self.open.trained:
            return step_start_ns(first_event_ns, self.open.end_ns)
        return step_start_ns(first_event_ns, 0 if self.paused else self.idle_since_ns)

    def give_own_identity(self, segment: StepSegment) -> None:
        """Give an evaluation inside an unfinished step its own ids, at its first forward."""
        if self.shares_identity(segment) and not (segment.forwards or segment.trained):
            segment.identity = Identity()

    def close_open(self) -> None:
        """Close the open segment: it continues the step, is an evaluation, or is dropped.

        A segment that only fetched is recorded as "data" if its ids were fixed: spans of the program are below it.
        """
        segment, self.open = self.open, None
        if segment is None:
            return
        self.listener.on_segment_end(segment)
        if segment.forward_id:
            segment.forward_ends()  # a span of the program is below it already
        if segment.trained or segment.explicit:
            segment.forward_ends()
            self.segments.append(segment)
            self.idle_since_ns, self.paused = segment.end_ns, False
            if self.by_hand and not segment.explicit:
                self.hand_over_each()
        elif segment.forwards:
            if self.idle_since_ns and not (
                segment.trains and segment.error is not None
            ):  # a failed step is no evaluation
                self.idle_since_ns += segment.end_ns - segment.start_ns
            if self.shares_identity(segment):
                segment.identity = Identity()
            self.listener.on_record("evaluation", [segment])
        elif segment.identity.reference is not None and not self.shares_identity(segment):
            self.listener.on_record("data", [segment])

    def fetch_ended(self, start_ns: int, end_ns: int, error: Error | None = None) -> None:
        """Close a fetch that opened no segment; it is recorded if its ids were fixed or if it failed."""
        identity, self.next = self.next, Identity()
        if identity.reference is not None or error is not None:
            segment = StepSegment(
                start_ns, end_ns, fetched=True, user_span=self.listener.user_span(), identity=identity, error=error
            )
            self.listener.on_record("data", [segment])

    def shares_identity(self, segment: StepSegment) -> bool:
        """Return whether the unfinished step has the segment's ids too."""
        return bool(self.segments) and segment.identity is self.segments[-1].identity

    def hand_over(self) -> None:
        """Hand over the closed segments as one step."""
        if self.segments:
            step, self.segments = self.segments, []
            self.emit_step(step)

    def hand_over_each(self) -> None:
        """Hand over each closed segment as a step."""
        segments, self.segments = self.segments, []
        for segment in segments:
            self.emit_step([segment])

    def ends_update(self, key: Hashable) -> bool:
        """Return whether the updates before an optimizer's step are complete, though this optimizer is not in them.

        That is so if it begins the turns that are known, or if it stepped alone in the last step: the program then
        updates one optimizer more often, or has trained with it alone before.
        """
        if not self.n_updates():
            return False
        return key == self.turn[0] if self.turn else self.cycle == {key}

    def hand_over_before(self, key: Hashable) -> None:
        """Hand over the closed segments up to the last optimizer step, since an optimizer's step ends them.

        They are one step, a turn as of a GAN, if this optimizer was the first of them, or if all optimizers of the last
        step, or only some of a turn, have stepped. Otherwise each update is a step, after a whole turn.
        """
        finished = [index for index, segment in enumerate(self.segments) if segment.finished]
        end = finished[-1] + 1
        keys, turn = _keys(self.segments[:end]), set(self.turn)
        if key in self.segments[finished[0]].optimizers or keys == self.cycle or keys <= turn:
            self._hand_over_first(end)
            return
        whole = next((index + 1 for index in finished if _keys(self.segments[: index + 1]) == turn), 0)
        if whole:
            self._hand_over_first(whole)
        self.hand_over_updates()

    def hand_over_updates(self) -> None:
        """Hand over each update of the closed segments as a step."""
        while self.n_updates():
            self._hand_over_first(next(index for index, segment in enumerate(self.segments) if segment.finished) + 1)

    def _hand_over_first(self, n_segments: int) -> None:
        step, self.segments = self.segments[:n_segments], self.segments[n_segments:]
        self.emit_step(step)

    def n_updates(self) -> int:
        """Return how many of the closed segments ended with an optimizer's step."""
        return sum(segment.finished for segment in self.segments)

    def emit_as_evaluations(self) -> None:
        """Hand over the closed segments as evaluations: they ran after the last step, such as `torch.func.jacrev`."""
        segments, self.segments = self.segments, []
        for segment in segments:
            if segment.forwards or segment.identity.reference is not None:
                self.listener.on_record("evaluation", [segment])

    def emit_step(self, segments: list[StepSegment]) -> None:
        """Hand over these segments as one step."""
        keys = _keys(segments)
        if keys:
            self.cycle = keys
            if len(keys) > 1:
                self.turn = tuple(dict.fromkeys(key for segment in segments for key in segment.optimizers))
        if self.segments or self.open is not None:
            self._separate_identity_from(segments)
        self.listener.on_record("step", segments)

    def _separate_identity_from(self, step: list[StepSegment]) -> None:
        """Give segments that are not part of a step, but share its ids, ids of their own."""
        identity = Identity()
        for segment in (*self.segments, self.open):
            if segment is not None and any(segment.identity is one.identity for one in step):
                segment.identity = identity


def _keys(segments: list[StepSegment]) -> set[Hashable]:
    if len(segments) == 1:  # most steps are one segment
        return set(segments[0].optimizers)
    return set().union(*[segment.optimizers for segment in segments])
