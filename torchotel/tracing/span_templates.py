"""Which module call encloses which, and what their spans have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

from torchotel import _semconv as names
from torchotel._records import CallSignature, ModuleCall, ModuleInfo
from torchotel._utils.gil import GilYielder
from torchotel.tracing.span import AttributeValue, SpanTemplate

MAX_TEMPLATES = 20_000

Directions: TypeAlias = tuple[SpanTemplate, SpanTemplate]
"""What all forward spans and all backward spans of a call site share."""


def enclosing_calls(calls: Sequence[ModuleCall], sliced: GilYielder) -> list[int]:
    """For each call the index of the one that encloses it, -1 for none; children stand before their parents.

    Calls of another lane may overlap in time, and enclose nothing of this one.
    """
    parents = [-1] * len(calls)
    open_calls: list[tuple[int, int, int]] = []  # index, start, lane
    for index in sliced(range(len(calls) - 1, -1, -1)):
        start_ns, note = calls[index].start_ns, calls[index].note
        lane = 0 if note is None else note.lane
        while open_calls and (open_calls[-1][1] > start_ns or open_calls[-1][2] not in (0, lane)):
            open_calls.pop()
        if open_calls:
            parents[index] = open_calls[-1][0]
        open_calls.append((index, start_ns, lane))
    return parents


def call_indices(calls: Sequence[ModuleCall], sliced: GilYielder) -> list[int | None]:
    """Number the calls of modules that run more than once, as they begin; recomputation does not count."""
    indices: list[int | None] = [None] * len(calls)
    if len({call.site.module for call in sliced(calls)}) == len(calls):
        return indices  # no module ran twice
    again = Counter(call.site.module for call in sliced(calls) if not _recomputed(call))
    numbered = [i for i in sliced(range(len(calls))) if again[calls[i].site.module] > 1 and not _recomputed(calls[i])]
    seen: Counter[object] = Counter()
    for index in sliced(sorted(numbered, key=lambda i: calls[i].start_ns)):
        module = calls[index].site.module
        indices[index] = seen[module]
        seen[module] += 1
    return indices


def _recomputed(call: ModuleCall) -> bool:
    return call.note is not None and call.note.recompute


class Templates:
    """The names and attributes that all spans of a call site share, and whether its module is shown.

    Args:
        include: Patterns of module paths that get spans; None: all.
        exclude: Patterns of those that do not.
        max_depth: Deepest level of modules that get spans; the root is 0.
    """

    def __init__(
        self,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        max_depth: int | None = None,
    ) -> None:
        self._include, self._exclude, self._max_depth = include, exclude, max_depth
        self._kept: dict[CallSignature, Directions | None] = {}

    def of(self, site: CallSignature) -> Directions | None:
        """Return the templates of forward and backward; None for a module that is not shown."""
        try:
            return self._kept[site]
        except KeyError:
            if len(self._kept) >= MAX_TEMPLATES:  # ever new shapes
                self._kept.clear()
            made = self.of_any(site) if self._shown(site) else None
            self._kept[site] = made
            return made

    def includes(self, module: ModuleInfo) -> bool:
        """Tell whether a module is one of those that were asked for."""
        return self._include is None or _matches(module.path, self._include)

    @staticmethod
    def of_any(site: CallSignature) -> Directions:
        """Return the templates also of a module that is not shown."""
        return forward_template(site), backward_template(site)

    def _shown(self, site: CallSignature) -> bool:
        path = site.module.path
        if self._max_depth is not None and site.module.depth > self._max_depth:
            return False
        if not self.includes(site.module):
            return False
        return self._exclude is None or not _matches(path, self._exclude)


def _common(site: CallSignature, direction: str) -> dict[str, AttributeValue]:
    module = site.module
    return {
        names.MODULE_PATH: module.path,
        names.MODULE_TYPE: module.type,
        names.MODEL: module.model,
        names.DIRECTION: direction,
        names.DEVICE: site.device,
    }


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _with_shapes(
    attributes: dict[str, AttributeValue], shapes: dict[str, tuple[str, ...] | None]
) -> dict[str, AttributeValue]:
    return attributes | {name: value for name, value in shapes.items() if value is not None}


def forward_template(site: CallSignature) -> SpanTemplate:
    """Return what all forward spans of a call site share."""
    attributes = _with_shapes(
        _common(site, "forward"),
        {
            names.INPUT_SHAPES: site.input_shapes,
            names.OUTPUT_SHAPES: site.output_shapes,
            names.INPUT_DTYPES: site.input_dtypes,
            names.OUTPUT_DTYPES: site.output_dtypes,
        },
    )
    attributes[names.MODULE_PARAMETERS] = site.module.parameters
    attributes[names.TRAINING] = site.training
    attributes[names.GRAD_ENABLED] = site.grad_enabled
    if site.compiled:
        attributes[names.COMPILED] = True
    return SpanTemplate(names.FORWARD_PREFIX + site.module.path, attributes)


def backward_template(site: CallSignature) -> SpanTemplate:
    """Return what all backward spans of a call site share."""
    attributes = _with_shapes(
        _common(site, "backward"),
        {names.GRAD_INPUT_SHAPES: site.grad_input_shapes, names.GRAD_OUTPUT_SHAPES: site.grad_output_shapes},
    )
    return SpanTemplate(names.BACKWARD_PREFIX + site.module.path, attributes)
