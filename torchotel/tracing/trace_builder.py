"""Build the spans of a step or an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, cast

from torchotel import _semconv as names
from torchotel._records import (
    PHASE_SPANS,
    CallNote,
    Error,
    LogValue,
    ModuleCall,
    Phase,
    SpanReference,
    StepRecord,
    TensorGradient,
    enclosing,
)
from torchotel._utils.gil import GilYielder
from torchotel._utils.text import shortened
from torchotel.tracing.call_tree import Timed
from torchotel.tracing.ids import random_span_id
from torchotel.tracing.layout import Node, TraceSpanBudget, fold, lay_out
from torchotel.tracing.span import Attributes, AttributeValue, Span, SpanEvent, SpanLink, SpanTemplate, Trace
from torchotel.tracing.span_templates import Directions, Templates

ROOTS = {"step": names.SPAN_STEP, "evaluation": names.SPAN_EVALUATION, "data": names.SPAN_DATA}
"""Root spans of the kinds of records."""


def root_name(unit: StepRecord) -> str:
    """Return the name of the root span."""
    return ROOTS[unit.kind]


def root_parent(unit: StepRecord) -> SpanReference | None:
    """Return the user's span that an evaluation belongs to: one that ran with gradients off.

    Where its ids were given out before that was known, it has a trace of its own.
    """
    span = unit.user_span if unit.kind == "evaluation" and not unit.grad else None
    if span is None or (unit.identity is not None and unit.identity.trace_id != span.trace_id):
        return None
    return span


def root_attributes(unit: StepRecord, reason: str | None, nonfinite: Sequence[str]) -> dict[str, AttributeValue]:
    """Return what only this root has.

    Args:
        unit: The step or the evaluation.
        reason: Why it is kept.
        nonfinite: What of it went NaN or infinite.
    """
    attributes: dict[str, AttributeValue] = {names.THREAD_ID: unit.thread}
    if reason is not None:
        attributes[names.KEPT_REASON] = reason
    for name, value in unit.values.items():
        known = names.LOGGED_NAMES.get(name)
        key = names.LOG_PREFIX + name if known is None else known.attribute
        if key is not None and _says_something(value):
            attributes[key] = float(value) if name in names.LOGGED_GAUGES else value
    if unit.gradients is not None and isfinite(unit.gradients.total):
        attributes[names.GRADIENT_NORM] = unit.gradients.total
    if nonfinite:
        attributes[names.NONFINITE] = tuple(nonfinite)
    if unit.gap_ns:
        attributes[names.STEP_GAP] = unit.gap_ns / 1e9
    if unit.folded:
        attributes[names.FOLDED_EVALUATIONS] = unit.folded
        attributes[names.FOLDED_TIME] = unit.folded_ns / 1e9
    return attributes


def _says_something(value: LogValue) -> bool:
    """Tell whether a value can be written: one non-finite number breaks a search of Jaeger's."""
    return not isinstance(value, float) or isfinite(value)


def registered_events(unit: StepRecord) -> list[SpanEvent]:
    """Return an event for each module, parameter or buffer that came while the step ran."""
    return [
        SpanEvent(
            names.EVENT_REGISTERED,
            _inside(entry.time_ns, unit) + unit.unix_offset_ns,
            {names.MODULE_PATH: shortened(entry.path), names.REGISTERED_KIND: entry.kind},
        )
        for entry in unit.registrations
    ]


def gradient_events(unit: StepRecord) -> dict[int, list[SpanEvent]]:
    """Return the events of watched tensors by the index of the backward phase that they stand on; -1: the root."""
    events: dict[int, list[SpanEvent]] = {}
    for gradient in unit.tensor_gradients:
        events.setdefault(_backward_at(gradient.time_ns, unit.phases), []).append(_gradient_event(gradient, unit))
    return events


def _gradient_event(gradient: TensorGradient, unit: StepRecord) -> SpanEvent:
    attributes: dict[str, AttributeValue] = {names.TENSOR_NAME: gradient.name, names.TENSOR_SHAPE: gradient.shape}
    if gradient.norm is not None and isfinite(gradient.norm):
        attributes[names.GRADIENT_NORM] = gradient.norm
    return SpanEvent(names.EVENT_GRADIENT, _inside(gradient.time_ns, unit) + unit.unix_offset_ns, attributes)


def _backward_at(time_ns: int, phases: Sequence[Phase]) -> int:
    """Find the innermost run of the engine at a time."""
    best = -1
    for index, phase in enumerate(phases):
        runs = phase.kind == "backward" and phase.start_ns <= time_ns <= phase.end_ns
        if runs and (best < 0 or phase.start_ns >= phases[best].start_ns):
            best = index
    return best


def _inside(time_ns: int, unit: StepRecord) -> int:
    return min(max(time_ns, unit.start_ns), unit.end_ns)


_PLAIN = {name: SpanTemplate(name, {}) for name in (names.SPAN_STEP, names.SPAN_EVALUATION, *PHASE_SPANS.values())}
_new = cast("Callable[[type[Span], tuple[Any, ...]], Span]", tuple.__new__)  # half the time of Span(…)


MAX_ID = (1 << 64) - 1


class TraceBuilder:
    """Build the traces of a run, one for each step and each evaluation.

    Args:
        templates: What spans have in common, and which modules are shown.
        max_spans: Most spans of a trace, which evaluations of one request share; deeper modules fold into their
            parents. None: no limit.
        sliced: Works through calls and spans.
    """

    def __init__(
        self,
        templates: Templates,
        max_spans: int | None,
        sliced: GilYielder,
    ) -> None:
        self.templates, self._max_spans = templates, max_spans
        self._to_run: tuple[SpanLink, ...] = ()
        self._sliced = sliced
        self._room = TraceSpanBudget(max_spans)
        self._optimizers: dict[str, SpanTemplate] = {}

    def link_steps_to(self, run: SpanReference) -> None:
        """Link every step from now on to the span of the run."""
        self._to_run = (_link_to(run),)

    def build(self, unit: StepRecord, timed: Timed, root: SpanReference, attributes: Attributes) -> Trace:
        """Return the trace of a step or an evaluation: parents before children, children inside their parents.

        Args:
            unit: The step or the evaluation.
            timed: Its calls.
            root: The ids of its root.
            attributes: Those of its root.
        """
        parent = root_parent(unit)
        nodes = [_root(unit, root, attributes)]
        phase_nodes = self._add_phases(nodes, unit)
        # A root with a link has no critical path in Jaeger's page: it takes a root's first reference for a parent.
        nodes[phase_nodes[0] if phase_nodes else 0].links = self._links(unit, parent)
        if timed.calls:
            self._add_calls(nodes, phase_nodes, unit, timed)
        for phase, events in gradient_events(unit).items():
            nodes[phase_nodes[phase] if phase >= 0 else 0].events += tuple(events)
        for node in self._sliced(nodes):
            node.start_ns += unit.unix_offset_ns
            node.end_ns += unit.unix_offset_ns
        room = self._max_spans if parent is None else self._room.left(root.trace_id)
        folded = fold(nodes, room, self._sliced)
        lay_out(nodes, self._sliced)
        spans = _spans(nodes, folded, parent.span_id if parent is not None else 0, self._sliced)
        if parent is not None:
            self._room.take(root.trace_id, len(spans))
        return Trace(
            root.trace_id,
            spans,
            trace_attributes(unit),
            parent is not None and parent.remote,
            root.state,
            root.sampled,
        )

    def _links(self, unit: StepRecord, parent: SpanReference | None) -> tuple[SpanLink, ...]:
        """Link to the run, and to the user's span where that is not the parent."""
        links = self._to_run if unit.kind == "step" else ()
        return links if parent is not None or unit.user_span is None else (*links, _link_to(unit.user_span))

    def _add_phases(self, nodes: list[Node], unit: StepRecord) -> list[int]:
        """Add the phases and return the node of each; an evaluation shows its data phases only."""
        parents = enclosing(unit.phases)
        added: list[int] = []
        for phase, parent in zip(unit.phases, parents, strict=True):
            nested = phase.kind == "backward" and parent >= 0 and unit.phases[parent].kind == "backward"
            node = Node(self._phase_template(phase), added[parent] if nested else 0, phase.start_ns, phase.end_ns)
            node.span_id = phase.span_id
            _fail(node, phase.error)
            if phase.estimated is not None:
                node.set(names.ESTIMATED, phase.estimated)
            added.append(len(nodes))
            nodes.append(node)
        return added

    def _phase_template(self, phase: Phase) -> SpanTemplate:
        if phase.optimizer is None:
            return _PLAIN[PHASE_SPANS[phase.kind]]
        template = self._optimizers.get(phase.optimizer)
        if template is None:
            template = SpanTemplate(names.SPAN_OPTIMIZER, {names.OPTIMIZER_TYPE: phase.optimizer})
            self._optimizers[phase.optimizer] = template
        return template

    def _add_calls(self, nodes: list[Node], phase_nodes: Sequence[int], unit: StepRecord, timed: Timed) -> None:
        calls, hidden, of = timed.calls, timed.hidden, self.templates.of
        shown = [None if hidden[index] else of(calls[index].site) for index in self._sliced(range(len(calls)))]
        for index in self._sliced(range(len(calls))):
            note = calls[index].note
            if note is not None and note.span_id and shown[index] is None:
                shown[index] = self.templates.of_any(calls[index].site)  # the user's own spans are below it
        running = self._add_backward(nodes, phase_nodes, timed, shown)
        self._add_forward(nodes, phase_nodes, unit, timed, shown, running)

    def _add_backward(
        self, nodes: list[Node], phase_nodes: Sequence[int], timed: Timed, shown: Sequence[Directions | None]
    ) -> list[int]:
        """Add the backward spans; return their nodes."""
        node_of: dict[int, int] = {}
        added: list[int] = []
        indices = timed.indices
        for run in self._sliced(timed.runs):
            outer = phase_nodes[run.run] if run.run >= 0 else 0
            parent = node_of[id(run.parent)] if run.parent is not None else outer
            templates = shown[run.call]
            if templates is None:
                node_of[id(run)] = parent
                continue
            node = Node(templates[1], parent, run.start_ns, run.end_ns)
            node.error = run.error
            if (number := indices[run.call]) is not None:
                node.set(names.CALL_INDEX, number)
            if run.estimated is not None:
                node.set(names.ESTIMATED, run.estimated)
            if run.device_ns is not None:
                node.set(names.DEVICE_TIME, run.device_ns / 1e9)
            node_of[id(run)] = len(nodes)
            added.append(len(nodes))
            nodes.append(node)
        return added

    def _add_forward(
        self,
        nodes: list[Node],
        phase_nodes: Sequence[int],
        unit: StepRecord,
        timed: Timed,
        shown: Sequence[Directions | None],
        running: Sequence[int],
    ) -> None:
        calls, indices = timed.calls, timed.indices
        node_of = [0] * len(calls)
        for index in self._sliced(range(len(calls) - 1, timed.own - 1, -1)):  # parents first
            call, outer = calls[index], timed.parents[index]
            if outer >= 0:
                parent = node_of[outer]
            elif call.note is not None and call.note.recompute:
                parent = _running_at(call.start_ns, nodes, running) or _phase_at(call, unit, phase_nodes, "backward")
            else:
                parent = _phase_at(call, unit, phase_nodes, "forward")
            templates = shown[index]
            if templates is None:
                node_of[index] = parent
                continue
            node = Node(templates[0], parent, call.start_ns, call.end_ns)
            if call.note is not None:
                node.error = call.note.error
            if indices[index] is not None or call.note is not None:
                _annotate(node, indices[index], call.note)
            if (device_ns := timed.device_ns.get(index)) is not None:
                node.set(names.DEVICE_TIME, device_ns / 1e9)
            node_of[index] = len(nodes)
            nodes.append(node)


def _annotate(node: Node, index: int | None, note: CallNote | None) -> None:
    if index is not None:
        node.set(names.CALL_INDEX, index)
    if note is not None and note.estimated is not None:
        node.set(names.ESTIMATED, note.estimated)
    if note is not None and note.recompute:
        node.set(names.RECOMPUTE, value=True)
    if note is not None:
        node.span_id = note.span_id


def _running_at(time_ns: int, nodes: Sequence[Node], running: Sequence[int]) -> int:
    """Find the innermost backward span that runs at a time; 0 for none."""
    best = 0
    for index in running:
        if nodes[index].start_ns <= time_ns < nodes[index].end_ns and nodes[index].start_ns >= nodes[best].start_ns:
            best = index
    return best


def _phase_at(call: ModuleCall, unit: StepRecord, phase_nodes: Sequence[int], kind: str) -> int:
    """Find the innermost phase of a kind in which a call starts; 0, the root, for none."""
    best = 0
    best_start_ns = -1
    for phase, node in zip(unit.phases, phase_nodes, strict=True):
        inside = phase.start_ns <= call.start_ns <= phase.end_ns
        if phase.kind == kind and inside and phase.start_ns > best_start_ns:
            best, best_start_ns = node, phase.start_ns
    return best


def _link_to(span: SpanReference) -> SpanLink:
    return SpanLink(span.trace_id, span.span_id, {}, 0, span.sampled, span.remote, span.state)


def trace_attributes(unit: StepRecord) -> Attributes:
    """Return what every span of the trace carries."""
    return {names.STEP_NUMBER: unit.number} if unit.kind == "step" else {}


def _root(unit: StepRecord, reference: SpanReference, attributes: Attributes) -> Node:
    node = Node(_PLAIN[root_name(unit)], -1, unit.start_ns, unit.end_ns)
    node.span_id, node.events = reference.span_id, tuple(registered_events(unit))
    node.attributes = dict(attributes) or None
    _fail(node, unit.error)
    return node


def _fail(node: Node, error: Error | None) -> None:
    """Mark a root or a phase as failed, and name the module that raised: it has a span on detailed steps only."""
    node.error = error
    if error is not None and error.path is not None:
        node.set(names.MODULE_PATH, error.path)


def _spans(nodes: Sequence[Node], folded: set[int], parent_id: int, sliced: GilYielder) -> list[Span]:
    # Ids that differ in their low bytes compress three times better. They do not count on from the root's id: a
    # provider's generator may give those to other spans, and so may the generator of a trace above ours.
    first_id = random_span_id()
    spans: list[Span] = []
    for index in sliced(range(len(nodes))):
        if index not in folded:
            node = nodes[index]
            span_id = node.span_id = node.span_id or (first_id + index) & MAX_ID
            above = nodes[node.parent].span_id if index else parent_id
            fields = (
                node.template, span_id, above, node.start_ns, node.end_ns,
                node.attributes, node.error, node.events, node.links, None,
            )  # fmt: skip
            spans.append(_new(Span, fields))
    return spans
