"""Span contexts of the step and the module calls that are running.

A span that the program starts inside `forward`, such as a database query, must be a child of the module's span, which
is built later. So the ids of the step, its forward phase and the open module calls are fixed when a caller asks for
the current span context. Until then no ids are made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from torchotel import _semconv as names
from torchotel._records import Alignment, Baggage, SpanReference
from torchotel.capture.step_segment import Identity, StepSegment, unix_offset_ns

if TYPE_CHECKING:
    from torch.nn import Module

    from torchotel.capture.autograd_hooks import RecordingSwitch
    from torchotel.capture.module_calls import CallStack
    from torchotel.capture.thread_state import ThreadState


class StartSpan(Protocol):
    """Fixes the ids of a span."""

    def __call__(
        self,
        name: str,
        parent: SpanReference | None,
        start_ns: int,
        *,
        baggage: Baggage | None = None,
        alignment: Alignment | None = None,
    ) -> SpanReference:
        """Return the ids.

        Args:
            name: The name of the span; with an alignment, that of its rank replaces it.
            parent: The parent; None for a root.
            start_ns: The start, in unix time.
            baggage: The program's baggage, which spans below a torchotel span inherit.
            alignment: The alignment of a step that is in the trace of all ranks; None: it has its own trace.
        """


Leave: TypeAlias = Callable[[], None]
MakeCurrent: TypeAlias = Callable[[Callable[[], SpanReference | None], object], Leave | None]
"""Attaches a span that asks for its ids, for a key; returns a function that detaches it, None if the key has one."""


class ContextState:
    """What one thread has made current in the program's context."""

    __slots__ = ("current_identity", "is_answering", "leave_forward", "leave_step")

    def __init__(self) -> None:
        self.is_answering = False
        self.current_identity: object = None
        """The identity of the step that was made current."""
        self.leave_step: Leave | None = None
        """Restores the context before the step."""
        self.leave_forward: Leave | None = None
        """Restores the context before the forward, if that differs."""


class ActiveSpans:
    """Keep a thread's step current in the program's context, and fix the ids of the innermost open span on request.

    Args:
        start_span: Fixes ids.
        make_current: Puts into the context what answers.
        baggage: Returns the program's baggage on the calling thread, None if it is empty.
        alignment: Returns the alignment of a step that begins now, after a number of further ones.
        path_of: Returns the path of an open call's module, None for a module whose calls are left out.
        switch: Whether anything is recorded.
        fault: Called for an internal error, in its `except` block.
    """

    def __init__(
        self,
        start_span: StartSpan | None,
        make_current: MakeCurrent | None,
        baggage: Callable[[], Baggage | None],
        alignment: Callable[[int], Alignment | None],
        path_of: Callable[[CallStack, Module], str | None],
        switch: RecordingSwitch,
        fault: Callable[[], None],
    ) -> None:
        self._start_span, self._make_current, self._baggage = start_span, make_current, baggage
        self._alignment = alignment
        self._path_of, self._switch, self._fault = path_of, switch, fault
        self._lock = threading.RLock()  # reentrant: a signal handler may ask while its thread holds it

    # ---- keeping it current

    def enter(self, thread: ThreadState, segment: StepSegment | None, *, forward: bool = False) -> None:
        """Attach the thread's step to the context, once; for a forward also over a span that the user has opened.

        Each step has a span of its own, because copies of the context, such as those of threads, keep it.

        Args:
            thread: The calling one.
            segment: The thread's open segment; None to attach what a fetch will open.
            forward: Whether a forward begins.
        """
        if self._make_current is None:
            return
        if segment is None or thread.events.in_fetch:
            current = thread.current()
            if current is None:
                return
            identity = current[0]
        else:
            identity = segment.identity
        context = thread.context
        if context.current_identity is identity and not forward:
            return
        leave = self._make_current(lambda: self._answer(thread, identity), identity)
        if leave is None:
            return
        if context.current_identity is identity:
            context.leave_forward = leave
        else:
            context.current_identity, context.leave_step = identity, leave

    def leave_forward(self, thread: ThreadState) -> None:
        """Restore the context in which the forward began.

        A thread that has never trained restores it even if the segment may still become a step: the thread serves
        requests, and spans after a forward belong to the request.
        """
        context = thread.context
        leave, context.leave_forward = context.leave_forward, None
        segment = None if leave is not None or thread.events.trains else thread.step_detector.open_segment
        if (
            segment is not None
            and segment.user_span is not None
            and not (segment.fetched or segment.explicit or segment.trained)
        ):
            leave, context.leave_step, context.current_identity = context.leave_step, None, None
        if leave is not None:
            leave()

    def leave_step(self, thread: ThreadState) -> None:
        """Restore the context before the step, if nothing is open on the thread."""
        if thread.context.leave_step is not None and not thread.step_detector.in_step:
            leave, thread.context.leave_step, thread.context.current_identity = thread.context.leave_step, None, None
            leave()

    # ---- answering

    def _answer(self, thread: ThreadState, identity: Identity) -> SpanReference | None:
        """Return the innermost span; another thread that has a copy of the context gets the step."""
        if not self._switch.open:
            return None
        with self._lock:  # another thread may ask, too
            if thread.context.is_answering:
                return None
            thread.context.is_answering = True  # the user's span processor may ask again in `on_start`
            try:
                return self._innermost(thread, identity)
            except Exception:  # noqa: BLE001  # no internal error may reach the user's program
                self._fault()
                return None
            finally:
                thread.context.is_answering = False

    def _innermost(self, thread: ThreadState, identity: Identity) -> SpanReference | None:
        current, elsewhere = thread.current(), threading.get_ident() != thread.thread.ident
        start_span = self._start_span
        if current is None or start_span is None:
            return identity.reference if elsewhere else None
        attached = not elsewhere and thread.context.current_identity is identity
        if current[0] is not identity and (identity.reference is not None or not attached):
            return identity.reference  # of an earlier step, whose context the program has kept
        identity, start_ns = current
        segment = thread.step_detector.open_segment
        if segment is not None and segment.identity is not identity:
            segment = None  # a fetch runs that will open another
        reference = identity.reference or self._fix(start_span, identity, segment, start_ns)
        recorded = segment is not None and thread.root.in_forward and thread.calls.frames and not elsewhere
        if reference is None or segment is None or not recorded:
            return reference
        if thread.root.is_recomputation or thread.root.dropped_from is not None:
            return reference
        return self._innermost_call(start_span, thread, segment, reference, identity.unix_offset_ns)

    def _fix(
        self, start_span: StartSpan, identity: Identity, segment: StepSegment | None, start_ns: int
    ) -> SpanReference | None:
        """Fix the ids of a step; return None if its record may have been made without them meanwhile.

        Args:
            start_span: Makes the ids.
            identity: The step's, without ids.
            segment: Its open segment; None: a fetch runs that will open it.
            start_ns: When the step began.
        """
        identity.unix_offset_ns = unix_offset_ns()
        evaluates = segment is not None and segment.evaluates
        name = names.SPAN_EVALUATION if evaluates else names.SPAN_STEP
        user_span = segment.user_span if segment is not None and evaluates else None
        baggage = self._baggage() if segment is None else segment.baggage
        alignment = None if segment is None else segment.alignment
        alignment = alignment or (None if evaluates else self._alignment(0))
        start_ns += identity.unix_offset_ns
        identity.reference = start_span(name, user_span, start_ns, baggage=baggage, alignment=alignment)
        if identity.used:  # the step's own thread has ended it
            identity.reference = None
        return identity.reference

    def _innermost_call(
        self,
        start_span: StartSpan,
        thread: ThreadState,
        segment: StepSegment,
        root: SpanReference,
        unix_offset_ns: int,
    ) -> SpanReference:
        """Fix the ids of all open calls: the span of an inner call needs its parent's."""
        parent = root
        if segment.forward_start_ns is not None and not segment.opened_without_grad:
            if not segment.forward_id:
                forward = start_span(names.SPAN_FORWARD, root, segment.forward_start_ns + unix_offset_ns)
                segment.forward_id = forward.span_id
            parent = root._replace(span_id=segment.forward_id, remote=False)
        for frame in thread.calls.frames:
            reference = thread.calls.reserved_ids.get(id(frame))
            if reference is None:
                path = self._path_of(thread.calls, frame[0])
                if path is None:
                    continue
                start_ns = frame[2] + unix_offset_ns
                reference = start_span(names.FORWARD_PREFIX + path, parent, start_ns)
                thread.calls.reserved_ids[id(frame)] = reference
            parent = reference
        return parent
