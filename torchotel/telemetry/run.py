"""The run that steps belong to: the ids of `torch.run`, and that span."""

import hashlib
from collections.abc import Mapping

from torchotel import _names as names
from torchotel._records import ModelInfo, SpanReference
from torchotel.telemetry.spans import Attributes, AttributeValue, Span, SpanTemplate, Trace


def run_reference(run_id: str, generation: int) -> SpanReference:
    """Return the ids of `torch.run`: a hash, so that every rank links to the same span without asking."""
    digest = hashlib.sha256(f"{run_id}/{generation}/run".encode("utf-8", "replace")).digest()
    return SpanReference(int.from_bytes(digest[:16]), int.from_bytes(digest[16:24]), sampled=True)


def run_trace(
    reference: SpanReference, time_ns: int, model: ModelInfo | None, config: Attributes, versions: Mapping[str, str]
) -> Trace:
    """Build the trace of one span that says what runs: configuration, versions, model."""
    attributes: dict[str, AttributeValue] = {names.CONFIG_PREFIX + name: value for name, value in config.items()}
    attributes.update(versions)
    if model is not None:
        attributes[names.MODEL] = model.name
        attributes[names.MODULE_COUNT] = model.modules
        attributes[names.MODULE_PARAMETERS] = model.parameters
    span = Span(SpanTemplate(names.SPAN_RUN, attributes), reference.span_id, 0, time_ns, time_ns + 1_000_000)
    return Trace(reference.trace_id, [span], {})
