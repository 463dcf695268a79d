"""The resource: the attributes of the process that sends."""

import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from uuid import uuid4

from opentelemetry.sdk.resources import Resource, ResourceDetector

from torchotel import _semconv as names
from torchotel._utils.distributed import Identity, identify, own_run
from torchotel._utils.text import shortened
from torchotel._utils.version import package_version
from torchotel.tracing.span import Attributes, AttributeValue

COMMAND_LINE = {"process.command_args", "process.command_line"}
"""What a detector may add and we leave out: arguments hold passwords, and the resource is in every scrape."""

IDENTITY = {names.RUN_ID, names.RUN_GENERATION, names.RANK, names.LOCAL_RANK, names.WORLD_SIZE}
"""What our own detector may add, too, before it is known."""


class ProcessResource(Mapping[str, AttributeValue]):
    """The attributes of the resource, with the identity of the process as it was found last.

    A program may create its process group after `instrument()`, so exporters read the resource with their first
    record, not before.

    Args:
        described: The attributes that do not change.
        find_identity: Finds the identity of the process.
    """

    def __init__(self, described: Attributes, find_identity: Callable[[], Identity]) -> None:
        self._described, self._find_identity = described, find_identity
        self.update()

    def update(self) -> None:
        """Find the identity again."""
        self.identity = self._find_identity()
        self._attributes = {**self._described, **identity_attributes(self.identity)}

    def __getitem__(self, name: str) -> AttributeValue:
        return self._attributes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._attributes)

    def __len__(self) -> int:
        return len(self._attributes)


class TorchResourceDetector(ResourceDetector):
    """Add rank, local rank, world size and run id to the resource of any SDK; a process group counts if it exists.

    OpenTelemetry's SDK loads it by the name `torchotel` in OTEL_EXPERIMENTAL_RESOURCE_DETECTORS.
    """

    def detect(self) -> Resource:
        """Return the identity of this process."""
        run_id = os.environ.get("TORCHOTEL_RUN_ID", "").strip()
        identity = identify(os.environ, None if run_id.lower() == "none" else run_id, own_run.current())
        return Resource(identity_attributes(identity))


def describe_process(service_name: str | None, default_name: str, versions: Mapping[str, str]) -> Attributes:
    """Return the attributes that do not change: ours, the SDK's detectors' and OTEL_RESOURCE_ATTRIBUTES.

    What the variable says of service and host wins over what is found, as OpenTelemetry has it.

    Args:
        service_name: `service.name` where it was set; it wins over the variable.
        default_name: It where nothing says it.
        versions: Of torch and CUDA, by attribute.
    """
    own: dict[str, AttributeValue] = {
        "process.pid": os.getpid(),
        # `opentelemetry` is reserved: https://opentelemetry.io/docs/specs/semconv/resource/#telemetry-sdk
        names.SDK_NAME: names.SCOPE,
        names.SDK_VERSION: package_version(),
        **versions,
    }
    detected = dict(Resource.create({}).attributes)
    # The SDK makes an instance id of its own in newer versions only.
    detected.setdefault("service.instance.id", str(uuid4()))
    detected.setdefault("host.name", socket.gethostname())
    if service_name is not None:
        own["service.name"] = service_name
    elif re.fullmatch(r"\s*|unknown_service(:.*)?", str(detected["service.name"])):  # what the SDK says without a name
        own["service.name"] = default_name
    detected.update(own)
    return {name: _plain(value) for name, value in detected.items() if name not in COMMAND_LINE | IDENTITY}


def identity_attributes(identity: Identity) -> dict[str, str | int]:
    """Return the identity's attributes; those that are unknown are left out."""
    known: dict[str, str | int | None] = {
        names.RUN_ID: identity.run_id,
        names.RUN_GENERATION: identity.generation,
        names.RANK: identity.rank,
        names.LOCAL_RANK: identity.local_rank,
        names.WORLD_SIZE: identity.world_size,
    }
    return {name: value for name, value in known.items() if value is not None}


def _plain(value: object) -> AttributeValue:
    if isinstance(value, bool | int | float):
        return value
    return tuple(shortened(str(item)) for item in value) if isinstance(value, list | tuple) else shortened(str(value))
