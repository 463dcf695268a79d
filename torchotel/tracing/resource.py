"""The resource: the attributes of this process."""

import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from uuid import uuid4

from opentelemetry.sdk.resources import Resource, ResourceDetector

from torchotel import _semconv as names
from torchotel._utils.distributed import Identity, identify, own_run
from torchotel._utils.faults import warn_once
from torchotel._utils.installation import package_version
from torchotel._utils.text import shortened
from torchotel.tracing.span import Attributes, AttributeValue

COMMAND_LINE = {"process.command_args", "process.command_line"}
"""Attributes of detectors that are left out: arguments may be passwords, and each scrape includes the resource."""

IDENTITY = {names.RUN_ID, names.RUN_GENERATION, names.RANK, names.LOCAL_RANK, names.WORLD_SIZE, names.MESH}
"""Attributes that `TorchResourceDetector` may add before the final identity is known; `ProcessResource` adds them."""


class ProcessResource(Mapping[str, AttributeValue]):
    """The attributes of the resource, with the identity that was found last.

    A program may create its process group after `instrument()`, so exporters read the resource with their first
    record, not before.

    Args:
        described: The attributes without the identity.
        find_identity: Returns the identity of the process.
    """

    def __init__(self, described: Attributes, find_identity: Callable[[], Identity]) -> None:
        self.described, self._find_identity = described, find_identity
        self.update()

    def update(self) -> None:
        """Find the identity again."""
        self.identity = self._find_identity()
        self._attributes = {**self.described, **identity_attributes(self.identity)}

    def __getitem__(self, name: str) -> AttributeValue:
        return self._attributes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._attributes)

    def __len__(self) -> int:
        return len(self._attributes)


class TorchResourceDetector(ResourceDetector):
    """Add rank, local rank, world size and run id to the resource of any SDK.

    OpenTelemetry's SDK loads it by the name `torchotel` in OTEL_EXPERIMENTAL_RESOURCE_DETECTORS.
    """

    def detect(self) -> Resource:
        """Return the identity of this process."""
        run_id = os.environ.get("TORCHOTEL_RUN_ID", "").strip()
        identity = identify(os.environ, None if run_id.lower() == "none" else run_id, own_run.current())
        return Resource(identity_attributes(identity))


def describe_process(service_name: str | None, default_name: str, versions: Mapping[str, str]) -> Attributes:
    """Return the attributes without the identity: torchotel's, those of the SDK's detectors, OTEL_RESOURCE_ATTRIBUTES.

    The variable wins over detected attributes of service and host, as the specification requires. It sets none of
    torchotel's own attributes.

    Args:
        service_name: The setting; it wins over the variable. None: not set.
        default_name: `service.name` if nothing sets it.
        versions: Versions of torch and CUDA, by attribute.
    """
    own: dict[str, AttributeValue] = {
        "process.pid": os.getpid(),
        # `opentelemetry` is reserved: https://opentelemetry.io/docs/specs/semconv/resource/#telemetry-sdk
        names.SDK_NAME: names.SCOPE,
        names.SDK_VERSION: package_version(),
        **versions,
    }
    _warn_of_ignored({*own} | COMMAND_LINE | IDENTITY)
    detected = dict(Resource.create({}).attributes)
    # Older versions of the SDK set no instance id.
    detected.setdefault("service.instance.id", str(uuid4()))
    detected.setdefault("host.name", socket.gethostname())
    if service_name is not None:
        own["service.name"] = shortened(service_name)
    elif re.fullmatch(r"\s*|unknown_service(:.*)?", str(detected["service.name"])):  # the default of the SDK
        own["service.name"] = default_name
    detected.update(own)
    return {name: _plain(value) for name, value in detected.items() if name not in COMMAND_LINE | IDENTITY}


def _warn_of_ignored(reserved: set[str]) -> None:
    """Warn of attributes in OTEL_RESOURCE_ATTRIBUTES that torchotel sets or leaves out."""
    items = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")
    ignored = reserved & {item.partition("=")[0].strip() for item in items}
    if ignored:
        warn_once(
            "OTEL_RESOURCE_ATTRIBUTES: torchotel ignores %s, which it sets or leaves out itself. Remove them; "
            "TORCHOTEL_RUN_ID sets torch.run.id.",
            ", ".join(sorted(ignored)),
        )


def identity_attributes(identity: Identity) -> dict[str, str | int]:
    """Return the attributes of an identity, without those that are unknown."""
    known: dict[str, str | int | None] = {
        names.RUN_ID: identity.run_id,
        names.RUN_GENERATION: identity.generation,
        names.RANK: identity.rank,
        names.LOCAL_RANK: identity.local_rank,
        names.WORLD_SIZE: identity.world_size,
        names.DEVICE_ID: identity.device_id or None,
        names.MESH: identity.mesh or None,
    }
    return {name: value for name, value in known.items() if value is not None}


def _plain(value: object) -> AttributeValue:
    # Of any length: https://opentelemetry.io/docs/specs/otel/common/#exempt-entities
    if isinstance(value, bool | int | float):
        return value
    return tuple(map(str, value)) if isinstance(value, list | tuple) else str(value)
