"""Span templates: the name and the attributes that many spans share."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

from torchotel import _semconv as names
from torchotel._records import PHASE_SPANS, CallSignature, ModuleInfo, Phase
from torchotel.tracing.span import AttributeValue, SpanTemplate

MAX_TEMPLATES = 20_000
"""Call signatures whose templates are kept; a model with ever new shapes has any number of them."""

Directions: TypeAlias = tuple[SpanTemplate, SpanTemplate]
"""The templates of the forward spans and of the backward spans of one call signature."""

_ROOT_SPANS = {
    "step": names.SPAN_STEP,
    "evaluation": names.SPAN_EVALUATION,
    "data": names.SPAN_DATA,
    "stall": names.SPAN_STALL,
}
ROOT_TEMPLATES = {kind: SpanTemplate(name, {}) for kind, name in _ROOT_SPANS.items()}
"""The template of the root span, by the kind of the record."""
_PHASE_TEMPLATES = {kind: SpanTemplate(name, {}) for kind, name in PHASE_SPANS.items()}


class Templates:
    """Make and keep the templates of phases and of module calls.

    Args:
        include: Patterns of the module paths that get spans; None: all.
        exclude: Patterns of the module paths that get no spans.
        max_depth: Deepest level of modules that get spans; the root is 0.
    """

    def __init__(
        self,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        max_depth: int | None = None,
    ) -> None:
        self._include, self._exclude, self._max_depth = include, exclude, max_depth
        self._cache: dict[CallSignature, Directions | None] = {}
        self._optimizers: dict[str, SpanTemplate] = {}

    def of_phase(self, phase: Phase) -> SpanTemplate:
        """Return the template of a phase; each type of optimizer has its own."""
        if phase.optimizer is None:
            return _PHASE_TEMPLATES[phase.kind]
        template = self._optimizers.get(phase.optimizer)
        if template is None:
            template = SpanTemplate(names.SPAN_OPTIMIZER, {names.OPTIMIZER_TYPE: phase.optimizer})
            self._optimizers[phase.optimizer] = template
        return template

    def of_shown(self, signature: CallSignature) -> Directions | None:
        """Return the templates of a call; None if the settings exclude its module."""
        try:
            return self._cache[signature]
        except KeyError:
            if len(self._cache) >= MAX_TEMPLATES:
                self._cache.clear()
            templates = self.of_any(signature) if self._is_shown(signature.module) else None
            self._cache[signature] = templates
            return templates

    @staticmethod
    def of_any(signature: CallSignature) -> Directions:
        """Return the templates of a call, whether or not the settings exclude its module."""
        return _forward_template(signature), _backward_template(signature)

    def includes(self, module: ModuleInfo) -> bool:
        """Return whether `include` matches a module."""
        return self._include is None or _matches(module.path, self._include)

    def _is_shown(self, module: ModuleInfo) -> bool:
        if self._max_depth is not None and module.depth > self._max_depth:
            return False
        if not self.includes(module):
            return False
        return self._exclude is None or not _matches(module.path, self._exclude)


def _common(signature: CallSignature, direction: str) -> dict[str, AttributeValue]:
    module = signature.module
    return {
        names.MODULE_PATH: module.path,
        names.MODULE_TYPE: module.type,
        names.MODEL: module.model,
        names.DIRECTION: direction,
        names.DEVICE: signature.device,
    }


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _with_shapes(
    attributes: dict[str, AttributeValue], shapes: dict[str, tuple[str, ...] | None]
) -> dict[str, AttributeValue]:
    return attributes | {name: value for name, value in shapes.items() if value is not None}


def _forward_template(signature: CallSignature) -> SpanTemplate:
    attributes = _with_shapes(
        _common(signature, "forward"),
        {
            names.INPUT_SHAPES: signature.input_shapes,
            names.OUTPUT_SHAPES: signature.output_shapes,
            names.INPUT_DTYPES: signature.input_dtypes,
            names.OUTPUT_DTYPES: signature.output_dtypes,
        },
    )
    attributes[names.MODULE_PARAMETERS] = signature.module.parameters
    attributes[names.TRAINING] = signature.training
    attributes[names.GRAD_ENABLED] = signature.grad_enabled
    if signature.compiled:
        attributes[names.COMPILED] = True
    return SpanTemplate(names.FORWARD_PREFIX + signature.module.path, attributes)


def _backward_template(signature: CallSignature) -> SpanTemplate:
    attributes = _with_shapes(
        _common(signature, "backward"),
        {names.GRAD_INPUT_SHAPES: signature.grad_input_shapes, names.GRAD_OUTPUT_SHAPES: signature.grad_output_shapes},
    )
    return SpanTemplate(names.BACKWARD_PREFIX + signature.module.path, attributes)
