"""Whether a trace says what an independent count saw: every call a span, in its place, closed."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Size, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from fidelity.counted import Call, Counted
from torchotel import _semconv as names
from torchotel.testing import Captured, CapturedSpan


def faults(counted: Counted, captured: Captured) -> list[str]:
    """Name what is missing, too much, or in the wrong place; nothing where all is right."""
    stats = captured.handle.stats()
    found = [f"{stats[name]} {name}" for name in ("internal_errors", "calls_dropped", "spans_dropped") if stats[name]]
    found += [f"an Identity gave out another object: {name}" for name in counted.not_identical]
    spans = [span for root in captured.roots for span in root.walk()]
    found += [f"{span.name} is longer than what holds it" for span in spans if not _inside(span)]
    if not counted.in_part:
        found += [f"{span.name} has an estimated end" for span in spans if names.ESTIMATED in span.attributes]
    forwards = sorted(_of(spans, "forward"), key=lambda span: span.start_ns)[len(counted.building) :]
    if len(forwards) != len(counted.calls):
        return [*found, f"{len(forwards)} forward spans of {len(counted.calls)} calls"]
    return [*found, *_misplaced(counted.calls, forwards), *_backwards(counted, forwards, spans)]


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
    aliases = _aliases({call.module for call in calls if call.parent is None and not call.in_backward})
    for call, span in span_of.items():
        if span.attributes[names.MODULE_PATH] not in _paths(call, aliases):
            yield f"{span.name} stands where a {type(call.module).__qualname__} was called"
        if (names.RECOMPUTE in span.attributes) != call.in_backward:
            yield f"{span.name} is {'not ' if call.in_backward else ''}recomputed"
        if not (_says(span, names.INPUT_SHAPES, call.inputs) and _says(span, names.OUTPUT_SHAPES, call.outputs)):
            yield f"{span.name} has other shapes than {call.inputs}, {call.outputs}"
        parent = span.parent
        if call.parent is not None and parent is not span_of[call.parent]:
            yield f"{span.name} is below {parent.name if parent else 'nothing'}"
        if call.parent is None and not _may_hold_outermost(parent, call):
            yield f"{span.name} is below {parent.name if parent else 'nothing'}, and no module called it"


def _says(span: CapturedSpan, name: str, shapes: Sequence[Size] | None) -> bool:
    said = span.attributes.get(name, ())
    return shapes is None or said == tuple("x".join(map(str, shape)) or "scalar" for shape in shapes)


def _aliases(roots: Iterable[nn.Module]) -> dict[nn.Module, set[str]]:
    """Collect what modules go by; a root by nothing, though it shows as its class."""
    found: dict[nn.Module, set[str]] = {}
    for root in roots:
        found.setdefault(root, set()).add("")
        for path, module in root.named_modules(remove_duplicate=False):
            found.setdefault(module, set()).add(_without_wrappers(root, path))
    return found


def _without_wrappers(root: nn.Module, path: str) -> str:
    """Leave out of a path the names under which wrappers hold what they wrap."""
    kept, module = list[str](), root
    for name in path.split(".") if path else ():
        inner = module._modules[name]
        assert inner is not None
        kept += [name] if _wrapped(module) is not inner else []
        module = inner
    return ".".join(kept)


def _wrapped(module: nn.Module) -> nn.Module | None:
    """Return what a wrapper holds; None for another module."""
    if isinstance(module, DataParallel | DistributedDataParallel | FullyShardedDataParallel):
        return module.module
    return module._checkpoint_wrapped_module if isinstance(module, CheckpointWrapper) else None


def _unwrapped(module: nn.Module) -> nn.Module:
    """Give what a wrapper goes by."""
    inner = _wrapped(module)
    return module if inner is None else _unwrapped(inner)


def _paths(call: Call, aliases: Mapping[nn.Module, set[str]]) -> set[str]:
    """Give the paths that the call may show; of a module that none holds, its caller's with its class."""
    named = _unwrapped(call.module)
    own = type(named).__name__
    if isinstance(named, FSDPModule):
        own = own.removeprefix("FSDP")
    if call.module in aliases:
        return {path or own for path in aliases[call.module]}
    if call.parent is None or "" in aliases.get(call.parent.module, ()):
        return {own}
    return {f"{path}.{own}" for path in _paths(call.parent, aliases)}


def _may_hold_outermost(span: CapturedSpan | None, call: Call) -> bool:
    if span is None:
        return False
    if call.in_backward:
        return span.name == names.SPAN_BACKWARD or span.attributes.get(names.DIRECTION) == "backward"
    return span.name == (names.SPAN_FORWARD if call.with_grad else names.SPAN_EVALUATION)


def _backwards(counted: Counted, forwards: Sequence[CapturedSpan], spans: Sequence[CapturedSpan]) -> Iterator[str]:
    """Compare the backward spans with the calls that the runs of the engine go through."""
    key_of = {call: _key(span) for call, span in zip(counted.calls, forwards, strict=True)}
    expected = Counter(
        (key_of[call], key_of[call.parent] if call.parent in run else None) for run in counted.runs for call in run
    )
    seen = Counter((_key(span), _key_of_parent(span)) for span in _of(spans, "backward"))
    for (key, parent), count in (expected - seen).items():
        yield f"{count} backward spans of {key} are not below {parent or names.SPAN_BACKWARD}"
    for (key, parent), count in (seen - expected).items():
        yield f"{count} backward spans of {key} too many below {parent or names.SPAN_BACKWARD}"


def _key_of_parent(span: CapturedSpan) -> tuple[object, ...] | None:
    assert span.parent is not None
    return None if span.parent.name == names.SPAN_BACKWARD else _key(span.parent)


def _key(span: CapturedSpan) -> tuple[object, ...]:
    """Give what the forward and the backward of a call have in common; recomputed ones of a module share it."""
    wanted = (names.STEP_NUMBER, names.MODEL, names.MODULE_PATH, names.CALL_INDEX)
    return tuple(span.attributes.get(name) for name in wanted)
