"""Who sends: the attributes of the process."""

import os
import socket
from collections.abc import Mapping
from uuid import uuid4

from opentelemetry.sdk.resources import Resource

from torchotel import _names as names
from torchotel._text import shortened
from torchotel.telemetry.spans import Attributes, AttributeValue

COMMAND_LINE = {"process.command_args", "process.command_line"}
"""What a detector may add and we leave out: arguments hold passwords, and the resource is in every scrape."""


def describe_process(
    service_name: str | None, default_name: str, run_id: str, environ: Mapping[str, str], versions: Mapping[str, str]
) -> Attributes:
    """Return the resource's attributes: ours, the SDK's detectors' and OTEL_RESOURCE_ATTRIBUTES.

    What the variable says of service and host wins over what is found, as OpenTelemetry has it.

    Args:
        service_name: `service.name` where it was set; it wins over the variable.
        default_name: It where nothing says it.
        run_id: The run, the same on all its ranks.
        environ: Where torchrun tells rank and world size.
        versions: Of torch and CUDA, by attribute.
    """
    own: dict[str, AttributeValue] = {
        "process.pid": os.getpid(),
        names.RUN_ID: run_id,
        names.RUN_GENERATION: _number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        names.RANK: _number(environ, "RANK", 0),
        names.LOCAL_RANK: _number(environ, "LOCAL_RANK", 0),
        names.WORLD_SIZE: _number(environ, "WORLD_SIZE", 1),
        **versions,
    }
    detected = dict(Resource.create({}).attributes)
    # The SDK makes an instance id of its own in newer versions only.
    detected.setdefault("service.instance.id", str(uuid4()))
    detected.setdefault("host.name", socket.gethostname())
    if service_name is not None:
        own["service.name"] = service_name
    elif str(detected["service.name"]).startswith("unknown_service"):  # the specification's word for: nobody said it
        own["service.name"] = default_name
    detected.update(own)
    return {name: _plain(value) for name, value in detected.items() if name not in COMMAND_LINE}


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else default


def _plain(value: object) -> AttributeValue:
    if isinstance(value, bool | int | float):
        return value
    return tuple(shortened(str(item)) for item in value) if isinstance(value, list | tuple) else shortened(str(value))
