"""The trace that all ranks of a step share: its id, and the name of this rank's root."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from torchotel import _semconv as names
from torchotel._records import Alignment, StepRecord
from torchotel._utils.distributed import Identity
from torchotel.tracing.span import SpanTemplate
from torchotel.tracing.span_templates import ROOT_TEMPLATES

RANKS_WITH_MODULES = 4
"""Ranks whose module spans have the spans that are left in a trace; other ranks have their turn in other steps."""
STEP_SPANS = 6
"""Spans of a step with one phase of each kind."""
STEPS_SHARE = 0.9
"""Share of the spans of a trace that steps and phases may take; with more ranks, phases are attributes."""

SINGLE = Identity(rank=0, local_rank=0, world_size=1, run_id="", generation=0)
"""A process without other ranks."""


def shared_digest(identity: Identity, what: str) -> bytes:
    """Return 32 bytes that are the same on all ranks, and in no other launch, for what they name."""
    parts = identity.launch or identity.run_id, str(identity.generation), what
    return hashlib.sha256("/".join(parts).encode("utf-8", "replace")).digest()


class SharedTraces:
    """Put the steps of all ranks that have the same alignment into one trace.

    Each rank's step is a root. A common root above them would have to be sent by every rank, because any of them may
    end early, and Jaeger shows each copy of it.

    Args:
        find_identity: Returns the identity of this process.
    """

    def __init__(self, find_identity: Callable[[], Identity] = lambda: SINGLE) -> None:
        self._find_identity = find_identity
        self._template = ROOT_TEMPLATES["step"]

    def trace_id(self, alignment: Alignment | None) -> int | None:
        """Return the id of the trace of a step; None if the step has its own trace."""
        identity = self._find_identity()
        if alignment is None or not identity.launch:
            return None
        collectives, steps = alignment
        return int.from_bytes(shared_digest(identity, f"{collectives}/{steps}")[:16]) or 1

    def root_template(self, kind: str, alignment: Alignment | None) -> SpanTemplate:
        """Return the template of the root of a kind of record."""
        identity = self._find_identity()
        if alignment is None or not identity.launch:
            return ROOT_TEMPLATES[kind]
        name = f"{names.STEP_OF_RANK}{identity.rank}"
        if self._template.name != name:
            self._template = SpanTemplate(name, {})
        return self._template

    def max_spans(self, max_spans: int | None, alignment: Alignment | None) -> int | None:
        """Return the most spans that this rank adds to the trace of a step.

        All ranks have an equal share of one half. Only a few of them get a share of the rest, in turns. With so many
        ranks that phases do not fit, each other rank has one span.

        Args:
            max_spans: The most spans of a trace; None: no limit.
            alignment: Of the step.
        """
        identity, trace_id = self._find_identity(), self.trace_id(alignment)
        ranks = identity.world_size or 1
        if max_spans is None or trace_id is None or ranks == 1:
            return max_spans
        own = max(STEP_SPANS, max_spans // (2 * ranks))
        if ranks * own > STEPS_SHARE * max_spans:
            own = 1
        distance = -(-ranks // RANKS_WITH_MODULES)
        if (identity.rank - trace_id) % ranks % distance:
            return own
        return own + max(0, max_spans - ranks * own) // min(ranks, RANKS_WITH_MODULES)

    def root_name(self, record: StepRecord) -> str:
        """Return the name of a record's root span."""
        return self.root_template(record.kind, record.alignment).name
