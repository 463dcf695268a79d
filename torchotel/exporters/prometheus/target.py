"""The resource as Prometheus has it: the labels of `target_info`."""

from __future__ import annotations

import json
import re

from torchotel.exporters.spans import speakable_text
from torchotel.tracing.span import Attributes


def target_labels(resource: Attributes) -> dict[str, str]:
    """Return the resource as labels; where two names fall together their values are joined, as OpenTelemetry has it."""
    labels: dict[str, str] = {}
    for name in sorted(resource):
        value = resource[name]
        text = speakable_text(value) if isinstance(value, str) else json.dumps(value)
        safe = re.sub(r"[^a-zA-Z0-9]+", "_", name)  # two underscores at the start are Prometheus's own
        safe = f"key_{safe}" if safe[0].isdecimal() else safe
        labels[safe] = f"{labels[safe]};{text}" if safe in labels else text
    return labels
