"""The run that steps belong to: its id, and its one short span."""

import hashlib
import uuid
from collections.abc import Mapping

from torchotel import _names as names
from torchotel._records import ModelInfo, SpanReference
from torchotel._text import shortened
from torchotel.telemetry.spans import Attributes, AttributeValue, Span, SpanTemplate, Trace

LAUNCHER_IDS = ("TORCHELASTIC_RUN_ID", "RAY_JOB_ID", "KUBEFLOW_TRAINING_JOB_ID")


def find_run_id(given: str | None, environ: Mapping[str, str]) -> str:
    """Return the given id, else the launcher's, else a random one; "none" (torchrun's default) counts as absent."""
    if given is not None:
        return shortened(given)
    for name in LAUNCHER_IDS:
        text = environ.get(name, "")
        if text and text.lower() != "none":
            return shortened(text)
    job = environ.get("SLURM_JOB_ID", "")
    if job:
        return f"{job}.{environ.get('SLURM_STEP_ID', '0')}"
    return uuid.uuid4().hex[:12]


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
