"""The step that is being put together: its parts, and whether it is whole."""

from collections.abc import Callable, Hashable

from torchotel._records import Baggage, Error, SpanReference
from torchotel.capture.step_segment import Identity, StepSegment, step_start_ns


class StepAssembler:
    """Open and close parts, and hand them over as steps and evaluations.

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
        begins: Callable[[], None],
        baggage: Callable[[], Baggage | None],
    ) -> None:
        self._take, self._emit, self.user_span, self._begins = take, emit, user_span, begins
        self._baggage = baggage
        self.parts: list[StepSegment] = []
        """Closed parts of the step that is not handed over yet."""
        self.open: StepSegment | None = None
        self.next = Identity()
        """Of what the fetch that runs will open."""
        self.cycle: set[Hashable] = set()
        """Optimizers of the last step: what one step takes."""
        self._has_several = False
        """Several optimizers have stepped in one step: each is no end of a step before the next fetch."""
        self.by_hand = False
        """Parameters are updated without a torch optimizer: each part is a step."""
        self.idle_since_ns = 0
        """End of the last part of a step, plus the time of evaluations since; 0: there was no step yet."""
        self.paused = False
        """Capture was paused since that end."""

    def has_one_optimizer(self) -> bool:
        """Tell whether one optimizer steps once a step, as far as seen; unknown at the first step: no."""
        keys = _keys(self.parts if self.open is None else [*self.parts, self.open])
        return len(keys) == 1 and len(self.cycle) <= 1 and (bool(self.cycle) or self._repeats())

    def _repeats(self) -> bool:
        finished = [part for part in (*self.parts, self.open) if part is not None and part.finished]
        return len(finished) > 1

    def has_fetch(self) -> bool:
        """Tell whether a closed part began with a fetch."""
        for part in self.parts:  # noqa: SIM110  # a generator would be one function more at every step
            if part.fetched:
                return True
        return False

    def is_finished(self) -> bool:
        """Tell whether the last closed part ended with an optimizer's step."""
        return bool(self.parts) and self.parts[-1].finished

    def is_whole(self) -> bool:
        """Tell whether all optimizers that stepped in the last step have done so in the closed parts."""
        return len(self.cycle) <= 1 or self.cycle <= _keys(self.parts)

    def goes_on(self) -> bool:
        """Tell whether the step goes on after an optimizer's step until the next fetch, as that of a GAN does."""
        return self.has_fetch() and (self._has_several or not self.cycle)

    def begin(self, now_ns: int, *, fetched: bool = False) -> StepSegment:
        """Open a part; one that goes on with a step shares its ids."""
        self._begins()
        part = self.open = StepSegment(now_ns, now_ns, fetched, user_span=self.user_span(), baggage=self._baggage())
        part.idle_since_ns, part.paused = self.idle_since_ns, self.paused
        if self.parts and not self.is_finished():
            part.identity, part.ahead = self.parts[-1].identity, self.parts[-1].ahead
        elif fetched:
            part.identity, self.next = self.next, Identity()
        return part

    def step_start_ns(self, first_event_ns: int) -> int:
        """Return the start of the step that an event would open."""
        if self.open is not None and self.open.trained:
            return step_start_ns(first_event_ns, self.open.end_ns)
        return step_start_ns(first_event_ns, 0 if self.paused else self.idle_since_ns)

    def keep_apart(self, part: StepSegment) -> None:
        """Give an evaluation amid a step that goes on ids of its own, at its first forward."""
        if self._shared(part) and not (part.forwards or part.trained):
            part.identity = Identity()

    def close_open(self) -> None:
        """Close the open part: it goes on the step, or is an evaluation, or nothing.

        Where it only fetched, but gave out ids, spans of the user's are below it, and it is there as data alone.
        """
        part, self.open = self.open, None
        if part is None:
            return
        self._take(part)
        if part.forward_id:
            part.forward_ends()  # somebody's span is below it already
        if part.trained or part.explicit:
            part.forward_ends()
            self.parts.append(part)
            self.idle_since_ns, self.paused = part.end_ns, False
            if self.by_hand and not part.explicit:
                self.hand_over_each()
        elif part.forwards:
            if self.idle_since_ns and not (part.trains and part.error is not None):  # a failed step is no evaluation
                self.idle_since_ns += part.end_ns - part.start_ns
            if self._shared(part):
                part.identity = Identity()
            self._emit("evaluation", [part])
        elif part.identity.reference is not None and not self._shared(part):
            self._emit("data", [part])

    def fetch_ended(self, start_ns: int, end_ns: int, error: Error | None = None) -> None:
        """Close a fetch that opened nothing; it is handed over if its ids were given out, or if it failed."""
        identity, self.next = self.next, Identity()
        if identity.reference is not None or error is not None:
            part = StepSegment(
                start_ns, end_ns, fetched=True, user_span=self.user_span(), identity=identity, error=error
            )
            self._emit("data", [part])

    def _shared(self, part: StepSegment) -> bool:
        """Tell whether a step that goes on has the part's ids too."""
        return bool(self.parts) and part.identity is self.parts[-1].identity

    def hand_over(self) -> None:
        """Hand over the closed parts as one step."""
        if self.parts:
            step, self.parts = self.parts, []
            self.emit_step(step)

    def hand_over_each(self) -> None:
        """Hand over each of them as a step of its own."""
        parts, self.parts = self.parts, []
        for part in parts:
            self.emit_step([part])

    def set_aside(self) -> None:
        """Hand over the closed parts as evaluations: what ran after a training's last step, as `torch.func.jacrev`."""
        parts, self.parts = self.parts, []
        for part in parts:
            if part.forwards or part.identity.reference is not None:
                self._emit("evaluation", [part])

    def emit_step(self, parts: list[StepSegment]) -> None:
        """Hand over these parts as one step."""
        keys = _keys(parts)
        if keys:
            self.cycle = keys
            self._has_several = self._has_several or len(keys) > 1
        if self.parts or self.open is not None:
            self._keep_apart_from(parts)
        self._emit("step", parts)

    def _keep_apart_from(self, step: list[StepSegment]) -> None:
        """Give what is no part of a step ids of its own, where it had been taken for one."""
        identity = Identity()
        for part in (*self.parts, self.open):
            if part is not None and any(part.identity is one.identity for one in step):
                part.identity = identity


def _keys(parts: list[StepSegment]) -> set[Hashable]:
    if len(parts) == 1:  # most steps are one part
        return set(parts[0].optimizers)
    return set().union(*[part.optimizers for part in parts])
