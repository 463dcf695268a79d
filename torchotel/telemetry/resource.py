"""Who sends: the attributes of the process."""

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from uuid import uuid4

from torchotel import _names as names
from torchotel._text import shortened
from torchotel.telemetry.spans import Attributes, AttributeValue

COMMAND_LINE = {"process.command_args", "process.command_line"}
"""What a detector may add and we leave out: arguments hold passwords, and the resource is in every scrape."""


def describe_process(
    service_name: str | None, default_name: str, run_id: str, environ: Mapping[str, str], versions: Mapping[str, str]
) -> Attributes:
    """Return the resource's attributes: ours, the SDK's detectors' and OTEL_RESOURCE_ATTRIBUTES.

    What the variable says of service and host wins over what is found, as OpenTelemetry has it. The detectors are asked
    when an attribute first is: the SDK is slow to load, and a detector of the user's may ask a server.

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
    return _Resource(own, lambda: _detect(service_name, default_name))


class _Resource(Mapping[str, AttributeValue]):
    """Attributes that are known, which win, and those that are found once another one is asked for; by any thread."""

    def __init__(self, known: Attributes, find: Callable[[], Mapping[str, object]]) -> None:
        self._known, self._find = _plain(known), find
        self._all: Attributes | None = None
        self._lock = threading.RLock()  # a signal's handler may ask in the midst of it

    def __getitem__(self, name: str) -> AttributeValue:
        return self._known[name] if name in self._known else self._found()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found())

    def __len__(self) -> int:
        return len(self._found())

    def _found(self) -> Attributes:
        with self._lock:
            if self._all is None:
                self._all = {**_plain(self._find()), **self._known}
            return self._all


def _detect(service_name: str | None, default_name: str) -> dict[str, object]:
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415  # 11 ms, psutil among it

    detected: dict[str, object] = dict(Resource.create({}).attributes)
    # The SDK makes an instance id of its own in newer versions only.
    detected.setdefault("service.instance.id", str(uuid4()))
    detected.setdefault("host.name", socket.gethostname())
    if service_name is not None:
        detected["service.name"] = service_name
    elif str(detected["service.name"]).startswith("unknown_service"):  # the specification's word for: nobody said it
        detected["service.name"] = default_name
    return {name: value for name, value in detected.items() if name not in COMMAND_LINE}


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else default


def _plain(attributes: Mapping[str, object]) -> dict[str, AttributeValue]:
    return {name: _plain_value(value) for name, value in attributes.items()}


def _plain_value(value: object) -> AttributeValue:
    if isinstance(value, bool | int | float):
        return value
    return tuple(shortened(str(item)) for item in value) if isinstance(value, list | tuple) else shortened(str(value))
