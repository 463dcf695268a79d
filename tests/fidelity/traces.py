"""Whether a trace says what an independent count saw: every call a span, in its place, closed."""

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from fidelity.counted import Call, Counted
from torchotel import _names as names
from torchotel.testing import Captured, CapturedSpan


def faults(counted: Counted, captured: Captured) -> list[str]:
    """Name what is missing, too much, or in the wrong place; nothing where all is right."""
    stats = captured.handle.stats()
    found = [f"{stats[name]} {name}" for name in ("internal_errors", "calls_dropped", "spans_dropped") if stats[name]]
    found += [f"an Identity gave out another object: {name}" for name in counted.not_identical]
    spans = [span for root in captured.roots for span in root.walk()]
    found += [f"{span.name} is longer than what holds it" for span in spans if not _inside(span)]
    found += [f"{span.name} has an estimated end" for span in spans if names.ESTIMATED in span.attributes]
    forwards = sorted(_of(spans, "forward"), key=lambda span: span.start_ns)
    if len(forwards) != len(counted.calls):
        return [*found, f"{len(forwards)} forward spans of {len(counted.calls)} calls"]
    return [*found, *_misplaced(counted.calls, forwards), *_backwards(counted.calls, forwards, spans)]


def _of(spans: Sequence[CapturedSpan], direction: str) -> list[CapturedSpan]:
    return [span for span in spans if span.attributes.get(names.DIRECTION) == direction]


def _inside(span: CapturedSpan) -> bool:
    parent = span.parent
    return span.start_ns <= span.end_ns and (
        parent is None or (parent.start_ns <= span.start_ns and span.end_ns <= parent.end_ns)
    )


def _misplaced(calls: Sequence[Call], forwards: Sequence[CapturedSpan]) -> Iterator[str]:
    """Compare each forward span with its call, both in the order of their start."""
    span_of = dict(zip(calls, forwards, strict=True))
    aliases = {call.module: _aliases(call.module) for call in calls if call.parent is None}
    for call, span in span_of.items():
        path = span.attributes[names.MODULE_PATH]
        if path not in aliases[_outermost(call).module].get(call.module, ()):
            yield f"{span.name} stands where a {type(call.module).__qualname__} was called"
        parent = span.parent
        if call.parent is not None and parent is not span_of[call.parent] and not call.in_backward:
            yield f"{span.name} is below {parent.name if parent else 'nothing'}"
        if call.parent is None and not call.in_backward and (parent is None or parent.name != names.SPAN_FORWARD):
            yield f"{span.name} is below {parent.name if parent else 'nothing'}, and no module called it"


def _outermost(call: Call) -> Call:
    while call.parent is not None:
        call = call.parent
    return call


def _aliases(root: nn.Module) -> dict[nn.Module, set[str]]:
    found: dict[nn.Module, set[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        found.setdefault(module, set()).add(path or type(root).__qualname__)
    return found


def _backwards(calls: Sequence[Call], forwards: Sequence[CapturedSpan], spans: Sequence[CapturedSpan]) -> Iterator[str]:
    """Compare the backward spans with the calls that the loss's graph goes through."""
    expected = {_key(span): call for call, span in zip(calls, forwards, strict=True) if call.backward}
    seen = {_key(span): span for span in _of(spans, "backward")}
    for key in expected.keys() - seen.keys():
        yield f"no backward of {key}"
    for key in seen.keys() - expected.keys():
        yield f"a backward of {key}, which made no node of the loss's graph"
    twice = Counter(_key(span) for span in _of(spans, "backward"))
    for key in (key for key, count in twice.items() if count > 1):
        yield f"{twice[key]} backwards of {key}"
    key_of = {call: key for key, call in expected.items()}
    for key in expected.keys() & seen.keys():
        parent, outer = seen[key].parent, expected[key].parent
        right = parent is seen.get(key_of[outer]) if outer in key_of else parent and parent.name == names.SPAN_BACKWARD
        if not right:
            yield f"backward of {key} is below {parent.name if parent else 'nothing'}"


def _key(span: CapturedSpan) -> tuple[object, ...]:
    """Give what the forward and the backward of a call have in common."""
    wanted = (names.STEP_NUMBER, names.MODEL, names.MODULE_PATH, names.CALL_INDEX)
    return tuple(span.attributes.get(name) for name in wanted)
