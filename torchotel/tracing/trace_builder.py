"""Build the trace of a record: nodes of phases and calls, then folding, layout and spans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, cast

from torchotel import _semconv as names
from torchotel._records import (
    CallNote,
    Error,
    LogValue,
    ModuleCall,
    Phase,
    SpanReference,
    StepRecord,
    TensorGradient,
    enclosing,
    phase_times_s,
)
from torchotel._utils.gil import GilYielder
from torchotel._utils.text import shortened
from torchotel.tracing.call_tree import CallTree, bubble_ratio
from torchotel.tracing.collective_spans import CollectiveSpans
from torchotel.tracing.ids import random_span_id
from torchotel.tracing.layout import Node, TraceSpanBudget, fold, lay_out
from torchotel.tracing.shared_trace import SharedTraces
from torchotel.tracing.span import Attributes, AttributeValue, Span, SpanEvent, SpanLink, SpanTemplate, Trace
from torchotel.tracing.span_templates import Directions, Templates

MAX_ID = (1 << 64) - 1

_new = cast("Callable[[type[Span], tuple[Any, ...]], Span]", tuple.__new__)  # half the time of Span(…)


@dataclass(slots=True)
class TraceNodes:
    """The nodes of a trace under construction, root first and parents before children."""

    all: list[Node]
    phases: list[int] = field(default_factory=list)
    """The node of each phase of the record."""
    backwards: list[int] = field(default_factory=list)
    """The nodes of backward calls."""


class TraceBuilder:
    """Build the traces of a run, one for each step and each evaluation.

    Args:
        templates: The templates of spans, which also decide which modules get spans.
        max_spans: The most spans of a trace, which evaluations of one request share; deeper modules fold into their
            parents. None: no limit.
        yielder: Iterates over calls and spans.
        shared: The traces that steps share with other ranks; None: there are no other ranks.
    """

    def __init__(
        self, templates: Templates, max_spans: int | None, yielder: GilYielder, shared: SharedTraces | None = None
    ) -> None:
        self.templates, self._yielder, self.shared = templates, yielder, shared or SharedTraces()
        self._budget, self._collectives = TraceSpanBudget(max_spans), CollectiveSpans()
        self._run_links: tuple[SpanLink, ...] = ()

    def link_steps_to(self, run: SpanReference) -> None:
        """Link every step from now on to the span of the run."""
        self._run_links = (_link_to(run),)

    def build(self, record: StepRecord, tree: CallTree, root: SpanReference, attributes: Attributes) -> Trace:
        """Return the trace of a record: parents before children, children inside their parents.

        Args:
            record: The step or the evaluation.
            tree: The record's module calls.
            root: The ids of the root span.
            attributes: The attributes of the root span.
        """
        yielder, parent = self._yielder, root_parent(record)
        template = self.shared.root_template(record.kind, record.alignment)
        nodes = TraceNodes([_make_root(template, record, root, attributes)])
        _add_phases(nodes, record, self.templates)
        _add_links(nodes, self._links(record, parent))
        if tree.calls:
            shown = _find_templates(tree, self.templates, yielder)
            _add_backward_calls(nodes, tree, shown, yielder)
            _add_forward_calls(nodes, record, tree, shown, yielder)
            if (ratio := bubble_ratio(record, tree, yielder)) is not None:
                nodes.all[0].set(names.PIPELINE_BUBBLE_RATIO, ratio)
        self._collectives.add(nodes.all, record)
        _add_gradient_events(nodes, record)
        _convert_to_unix_time(nodes.all, record.unix_offset_ns, yielder)
        if parent is None:
            budget = self.shared.max_spans(self._budget.max_spans, record.alignment)
        else:
            budget = self._budget.remaining(root.trace_id)
        if budget == 1:
            _show_phases(nodes.all[0], record)
        folded = fold(nodes.all, budget, yielder)
        lay_out(nodes.all, yielder)
        spans = _make_spans(nodes.all, folded, 0 if parent is None else parent.span_id, yielder)
        if parent is not None:
            self._budget.spend(root.trace_id, len(spans))
        remote_parent = parent is not None and parent.remote
        common = trace_attributes(record)
        return Trace(root.trace_id, spans, common, remote_parent, root.state, root.sampled, root.other_flags)

    def _links(self, record: StepRecord, parent: SpanReference | None) -> tuple[SpanLink, ...]:
        """Link a step to the run, and a record to the user's span if that span is not its parent."""
        links = self._run_links if record.kind == "step" else ()
        return links if parent is not None or record.user_span is None else (*links, _link_to(record.user_span))


# The root span.


def root_parent(record: StepRecord) -> SpanReference | None:
    """Return the user's span that is the parent of an evaluation; None for any other record.

    An evaluation ran with gradients off. If its ids were fixed before that was known, it has a trace of its own.
    """
    span = record.user_span if record.kind == "evaluation" and not record.grad else None
    if span is None or (record.identity is not None and record.identity.trace_id != span.trace_id):
        return None
    return span


def root_attributes(record: StepRecord, reason: str | None, nonfinite: Sequence[str]) -> dict[str, AttributeValue]:
    """Return the attributes of a record's root span, without those of `trace_attributes`.

    Args:
        record: The step or the evaluation.
        reason: Why the sampler keeps the trace.
        nonfinite: The names of values and gradients that are NaN or infinite.
    """
    attributes: dict[str, AttributeValue] = {names.THREAD_ID: record.thread}
    if reason is not None:
        attributes[names.KEPT_REASON] = reason
    for name, value in record.values.items():
        known = names.LOGGED_NAMES.get(name)
        key = names.LOG_PREFIX + name if known is None else known.attribute
        if key is not None and _is_exportable(value):
            attributes[key] = float(value) if name in names.LOGGED_GAUGES else value
    if record.gradients is not None and isfinite(record.gradients.total):
        attributes[names.GRADIENT_NORM] = record.gradients.total
        if record.gradients.sharded:
            attributes[names.GRADIENT_SCOPE] = "shard"
    if nonfinite:
        attributes[names.NONFINITE] = tuple(nonfinite)
    if record.gap_ns:
        attributes[names.STEP_GAP] = record.gap_ns / 1e9
    if record.folded:
        attributes[names.FOLDED_EVALUATIONS] = record.folded
        attributes[names.FOLDED_TIME] = record.folded_ns / 1e9
    return attributes


def trace_attributes(record: StepRecord) -> Attributes:
    """Return the attributes that every span of a record's trace has."""
    has_step_number = record.kind == "step" or (record.kind == "stall" and record.grad)
    return {names.STEP_NUMBER: record.number} if has_step_number else {}


def _make_root(template: SpanTemplate, record: StepRecord, reference: SpanReference, attributes: Attributes) -> Node:
    node = Node(template, -1, record.start_ns, record.end_ns)
    node.span_id, node.events = reference.span_id, tuple(_registration_events(record))
    node.attributes = dict(attributes) or None
    _set_error(node, record.error)
    return node


def _is_exportable(value: LogValue) -> bool:
    """Return False for NaN and infinity: one such attribute makes Jaeger's search fail for all traces it finds."""
    return not isinstance(value, float) or isfinite(value)


def _set_error(node: Node, error: Error | None) -> None:
    """Mark a root or a phase as failed, and name the module that raised, since only detailed steps have its span."""
    node.error = error
    if error is not None and error.path is not None:
        node.set(names.MODULE_PATH, error.path)


# Links and events.


def _link_to(span: SpanReference) -> SpanLink:
    return SpanLink(span.trace_id, span.span_id, {}, 0, span.sampled, span.remote, span.state, span.other_flags)


def _add_links(nodes: TraceNodes, links: tuple[SpanLink, ...]) -> None:
    """Add links to the first phase: Jaeger takes the first link of a root for its parent and shows no critical path."""
    nodes.all[nodes.phases[0] if nodes.phases else 0].links = links


def _registration_events(record: StepRecord) -> list[SpanEvent]:
    """Return an event for each module, parameter or buffer that was registered during the step."""
    return [
        SpanEvent(
            names.EVENT_REGISTERED,
            _clamp(entry.time_ns, record) + record.unix_offset_ns,
            {names.MODULE_PATH: shortened(entry.path), names.REGISTERED_KIND: entry.kind},
        )
        for entry in record.registrations
    ]


def _add_gradient_events(nodes: TraceNodes, record: StepRecord) -> None:
    """Add an event for each gradient of a watched tensor to the innermost backward phase at its time, or the root."""
    for gradient in record.tensor_gradients:
        phase = _backward_at(gradient.time_ns, record.phases)
        nodes.all[nodes.phases[phase] if phase >= 0 else 0].events += (_gradient_event(gradient, record),)


def _gradient_event(gradient: TensorGradient, record: StepRecord) -> SpanEvent:
    attributes: dict[str, AttributeValue] = {names.TENSOR_NAME: gradient.name, names.TENSOR_SHAPE: gradient.shape}
    if gradient.norm is not None and isfinite(gradient.norm):
        attributes[names.GRADIENT_NORM] = gradient.norm
    return SpanEvent(names.EVENT_GRADIENT, _clamp(gradient.time_ns, record) + record.unix_offset_ns, attributes)


def _backward_at(time_ns: int, phases: Sequence[Phase]) -> int:
    """Return the index of the innermost backward phase at a time; -1 if there is none."""
    best = -1
    for index, phase in enumerate(phases):
        runs = phase.kind == "backward" and phase.start_ns <= time_ns <= phase.end_ns
        if runs and (best < 0 or phase.start_ns >= phases[best].start_ns):
            best = index
    return best


def _clamp(time_ns: int, record: StepRecord) -> int:
    return min(max(time_ns, record.start_ns), record.end_ns)


# Phases and module calls.


def _add_phases(nodes: TraceNodes, record: StepRecord, templates: Templates) -> None:
    """Add a node for each phase: below the root, and below the outer backward if the engine runs nested."""
    parents = enclosing(record.phases)
    for phase, parent in zip(record.phases, parents, strict=True):
        nested = phase.kind == "backward" and parent >= 0 and record.phases[parent].kind == "backward"
        node = Node(templates.of_phase(phase), nodes.phases[parent] if nested else 0, phase.start_ns, phase.end_ns)
        node.span_id = phase.span_id
        _set_error(node, phase.error)
        if phase.estimated is not None:
            node.set(names.ESTIMATED, phase.estimated)
        nodes.phases.append(len(nodes.all))
        nodes.all.append(node)


def _show_phases(root: Node, record: StepRecord) -> None:
    """Set the times of phases as attributes of the step: the trace has no room for their spans."""
    for kind, seconds in phase_times_s(record).items():
        root.set(names.PHASE_PREFIX + kind, seconds)


def _find_templates(tree: CallTree, templates: Templates, yielder: GilYielder) -> Sequence[Directions | None]:
    """Return the templates of each call; None if the call gets no span."""
    calls, hidden, of_shown = tree.calls, tree.hidden, templates.of_shown
    shown = [None if hidden[index] else of_shown(calls[index].signature) for index in yielder(range(len(calls)))]
    for index in yielder(range(len(calls))):
        note = calls[index].note
        if note is not None and note.span_id and shown[index] is None:
            shown[index] = templates.of_any(calls[index].signature)  # it is the parent of a user span
    return shown


def _add_backward_calls(
    nodes: TraceNodes, tree: CallTree, shown: Sequence[Directions | None], yielder: GilYielder
) -> None:
    """Add a node for each backward call, below its nearest shown ancestor or its phase."""
    node_of: dict[int, int] = {}
    indices, all_nodes = tree.indices, nodes.all
    for backward in yielder(tree.backwards):
        outer = nodes.phases[backward.phase] if backward.phase >= 0 else 0
        parent = node_of[id(backward.parent)] if backward.parent is not None else outer
        templates = shown[backward.call]
        if templates is None:
            node_of[id(backward)] = parent
            continue
        node = Node(templates[1], parent, backward.start_ns, backward.end_ns)
        node.error = backward.error
        if (number := indices[backward.call]) is not None:
            node.set(names.CALL_INDEX, number)
        if backward.estimated is not None:
            node.set(names.ESTIMATED, backward.estimated)
        if backward.device_ns is not None:
            node.set(names.DEVICE_TIME, backward.device_ns / 1e9)
        _set_microbatch(node, tree.calls[backward.call].note)
        node_of[id(backward)] = len(all_nodes)
        nodes.backwards.append(len(all_nodes))
        all_nodes.append(node)


def _add_forward_calls(
    nodes: TraceNodes,
    record: StepRecord,
    tree: CallTree,
    shown: Sequence[Directions | None],
    yielder: GilYielder,
) -> None:
    """Add a node for each of the record's calls, below its nearest shown ancestor or its phase."""
    calls, parents, indices, all_nodes = tree.calls, tree.parents, tree.indices, nodes.all
    node_of = [0] * len(calls)
    for index in yielder(range(len(calls) - 1, tree.first_own - 1, -1)):  # parents first
        call, outer, templates = calls[index], parents[index], shown[index]
        parent = node_of[outer] if outer >= 0 else _find_phase_node(call, nodes, record)
        if templates is None:
            node_of[index] = parent
            continue
        node = Node(templates[0], parent, call.start_ns, call.end_ns)
        if indices[index] is not None or call.note is not None:
            _annotate(node, indices[index], call.note)
        if (device_ns := tree.device_ns.get(index)) is not None:
            node.set(names.DEVICE_TIME, device_ns / 1e9)
        node_of[index] = len(all_nodes)
        all_nodes.append(node)


def _annotate(node: Node, index: int | None, note: CallNote | None) -> None:
    if index is not None:
        node.set(names.CALL_INDEX, index)
    if note is None:
        return
    node.error, node.span_id = note.error, note.span_id
    if note.estimated is not None:
        node.set(names.ESTIMATED, note.estimated)
    if note.recompute:
        node.set(names.RECOMPUTE, value=True)
    _set_microbatch(node, note)


def _set_microbatch(node: Node, note: CallNote | None) -> None:
    if note is not None and note.microbatch is not None:
        stage, microbatch = note.microbatch
        node.set(names.PIPELINE_STAGE, stage)
        node.set(names.PIPELINE_MICROBATCH, microbatch)


def _find_phase_node(call: ModuleCall, nodes: TraceNodes, record: StepRecord) -> int:
    """Return the node that an outermost call belongs to: the forward phase or, if it is recomputed, a backward."""
    if call.note is not None and call.note.recompute:
        backward = _innermost_backward_at(call.start_ns, nodes)
        return backward or _phase_at(call.start_ns, "backward", nodes, record)
    return _phase_at(call.start_ns, "forward", nodes, record)


def _innermost_backward_at(time_ns: int, nodes: TraceNodes) -> int:
    """Return the innermost backward call at a time; 0 if there is none."""
    best = 0
    for index in nodes.backwards:
        node = nodes.all[index]
        if node.start_ns <= time_ns < node.end_ns and node.start_ns >= nodes.all[best].start_ns:
            best = index
    return best


def _phase_at(time_ns: int, kind: str, nodes: TraceNodes, record: StepRecord) -> int:
    """Return the innermost phase of a kind at a time; 0, the root, if there is none."""
    best = 0
    best_start_ns = -1
    for phase, node in zip(record.phases, nodes.phases, strict=True):
        inside = phase.start_ns <= time_ns <= phase.end_ns
        if phase.kind == kind and inside and phase.start_ns > best_start_ns:
            best, best_start_ns = node, phase.start_ns
    return best


# Spans.


def _convert_to_unix_time(nodes: Sequence[Node], unix_offset_ns: int, yielder: GilYielder) -> None:
    for node in yielder(nodes):
        node.start_ns += unix_offset_ns
        node.end_ns += unix_offset_ns


def _make_spans(nodes: Sequence[Node], folded: set[int], parent_id: int, yielder: GilYielder) -> list[Span]:
    # Ids that differ in their low bytes only compress three times better. They do not follow the root's id: a
    # provider's generator, or the generator of a trace above the root, may give these ids to other spans.
    first_id = random_span_id()
    spans: list[Span] = []
    for index in yielder(range(len(nodes))):
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
