"""Records as bytes, and settings as plain types, for the companion process.

A message is one `marshal` value of plain types. A `CallSignature` and a `ModuleInfo` are sent once, and referred to by
number. Both processes run the same version of Python and of torchotel; the version in the message is checked,
since `marshal` has no schema.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, Final, NamedTuple

from torchotel._records import (
    CallNote,
    CallSignature,
    Collective,
    DeviceMemory,
    DeviceTimes,
    Error,
    GradientNorms,
    Log,
    ModelInfo,
    ModuleCall,
    ModuleInfo,
    Phase,
    Record,
    Registration,
    SpanReference,
    StepRecord,
    TensorGradient,
    plain,
)
from torchotel._utils.distributed import Identity
from torchotel.tracing.span import AttributeValue
from torchotel.worker.channel import ChannelError

VERSION: Final = 1
MAX_DEFINITIONS = 1 << 16
"""Signatures that are remembered; a program with ever new shapes has any number of them. Then all are sent again."""

_MODULE_FIELDS = tuple(field.name for field in fields(ModuleInfo))
_SIGNATURE_FIELDS = tuple(field.name for field in fields(CallSignature))[1:]
_STEP_FIELDS = tuple(field.name for field in fields(StepRecord))
_PLAIN_FIELDS = ("user_span", "identity", "error", "registrations", "values", "tensor_gradients", "memory")
"""Fields that may hold other types than `marshal` knows. They are empty in most steps."""
_step_values = attrgetter(*_STEP_FIELDS)


class CompanionSettings(NamedTuple):
    """What the companion needs to start, in plain types."""

    pid: int
    """The training process."""
    config: dict[str, Any]
    described: dict[str, AttributeValue]
    """The attributes of the resource without the identity."""
    identity: tuple[Any, ...]
    versions: dict[str, str]
    run_folder: str | None
    metrics_fd: int | None
    """The descriptor of the open `metrics.jsonl` in the run folder."""
    unsent_fd: int | None
    """The descriptor of the locked file of the steps without a record."""
    listener_fd: int | None
    """The descriptor of the scrape endpoint's port."""
    signals_fd: int | None
    """The descriptor of the memory file that `faulthandler` writes a fatal signal to."""
    stacks_fd: int
    """The descriptor of the memory file that `faulthandler` writes the stack to at a signal."""
    started_unix_ns: int
    log_level: int
    """The level of the logger `torchotel`."""


class RunStart(NamedTuple):
    """What is final from the first record on."""

    identity: Identity
    model: ModelInfo | None


class RecordEncoder:
    """Encode records; a message has the definitions that it needs, and `confirm` or `retract` follows."""

    def __init__(self) -> None:
        self._modules: dict[ModuleInfo, int] = {}
        self._signatures: dict[CallSignature, int] = {}
        self._module_definitions: list[tuple[Any, ...]] = []
        self._signature_definitions: list[tuple[Any, ...]] = []
        self._confirmed = 0, 0
        """How many modules and signatures the receiver knows."""

    def encode(self, record: Record) -> bytes:
        """Return the message of a record."""
        if len(self._signatures) > MAX_DEFINITIONS:
            self.__init__()  # type: ignore[misc]  # numbers start again from 0, which the receiver sees
        kind, body = ("log", _encode_log(record)) if isinstance(record, Log) else ("step", self._encode_step(record))
        modules, signatures = self._confirmed
        definitions = (
            modules,
            self._module_definitions[modules:],
            signatures,
            self._signature_definitions[signatures:],
        )
        return marshal.dumps((VERSION, kind, body, definitions))

    def encode_start(self, start: RunStart) -> bytes:
        """Return the message of the start of a run, which defines nothing."""
        body = plain(start.identity), plain(start.model)
        return marshal.dumps((VERSION, "start", body, None))

    def confirm(self) -> None:
        """Note that the receiver will get the last message."""
        self._confirmed = len(self._module_definitions), len(self._signature_definitions)

    def retract(self) -> None:
        """Note that the receiver will not get the last message: the next ones define only what they need."""
        modules, signatures = self._confirmed
        del self._module_definitions[modules:], self._signature_definitions[signatures:]
        for numbers, confirmed in ((self._modules, modules), (self._signatures, signatures)):
            while len(numbers) > confirmed:
                numbers.popitem()

    def _encode_step(self, record: StepRecord) -> tuple[Any, ...]:
        values = dict(zip(_STEP_FIELDS, _step_values(record), strict=True))
        values["baggage"] = None  # for the program's TracerProvider, which the companion does not have
        for name in _PLAIN_FIELDS:
            if values[name]:
                values[name] = plain(values[name])
        values["phases"] = [_phase(phase) for phase in record.phases]
        number = self._signature_number
        values["calls"] = [
            (number(signature), start_ns, end_ns, starts, ends, _note(note), device_slot)
            for signature, start_ns, end_ns, starts, ends, note, device_slot in record.calls
        ]
        values["timestamps"] = list(record.timestamps)
        values["collectives"] = [tuple(collective) for collective in record.collectives]
        if record.gradients is not None:
            norms = [(self._module_number(module), float(norm)) for module, norm in record.gradients.modules]
            values["gradients"] = float(record.gradients.total), norms, record.gradients.sharded
        values["device_times"] = [
            (dict(times.forwards_ns), [list(clock) for clock in times.clocks]) for times in record.device_times
        ]
        return tuple(values.values())

    def _signature_number(self, signature: CallSignature) -> int:
        number = self._signatures.get(signature)
        if number is None:
            number = self._signatures[signature] = len(self._signatures)
            rest = plain([getattr(signature, name) for name in _SIGNATURE_FIELDS])
            self._signature_definitions.append((self._module_number(signature.module), *rest))
        return number

    def _module_number(self, module: ModuleInfo) -> int:
        number = self._modules.get(module)
        if number is None:
            number = self._modules[module] = len(self._modules)
            self._module_definitions.append(plain([getattr(module, name) for name in _MODULE_FIELDS]))
        return number


class RecordDecoder:
    """Decode the messages of one encoder, in order."""

    def __init__(self) -> None:
        self._modules: list[ModuleInfo] = []
        self._signatures: list[CallSignature] = []

    def decode(self, message: bytes) -> Record | RunStart:
        """Return the record of a message, or the start of the run.

        Raises:
            ChannelError: The message is no message, of another version, or an earlier message is missing.
        """
        try:
            version, kind, body, definitions = marshal.loads(message)  # noqa: S302  # from the process that started this one
        except (EOFError, ValueError, TypeError) as error:
            problem = f"no message ({error})"
            raise ChannelError(problem) from error
        if version != VERSION:
            problem = f"a message of version {version}, expected {VERSION}"
            raise ChannelError(problem)
        if kind == "start":
            identity, model = body
            return RunStart(Identity(*identity), _optional(ModelInfo, model))
        self._define(*definitions)
        return Log(*body) if kind == "log" else self._decode_step(body)

    def _define(
        self, module: int, modules: Sequence[tuple[Any, ...]], signature: int, signatures: Sequence[tuple[Any, ...]]
    ) -> None:
        if module > len(self._modules) or signature > len(self._signatures):
            raise ChannelError("a message that defines a module or a signature is missing")
        del self._modules[module:]
        del self._signatures[signature:]
        self._modules += [ModuleInfo(*values) for values in modules]
        self._signatures += [CallSignature(self._modules[number], *rest) for number, *rest in signatures]

    def _decode_step(self, body: tuple[Any, ...]) -> StepRecord:
        values = dict(zip(_STEP_FIELDS, body, strict=True))
        values["user_span"] = _optional(SpanReference, values["user_span"])
        values["identity"] = _optional(SpanReference, values["identity"])
        values["error"] = _optional(Error, values["error"])
        values["phases"] = [_read_phase(phase) for phase in values["phases"]]
        signatures = self._signatures
        values["calls"] = [
            ModuleCall(signatures[number], start_ns, end_ns, starts, ends, _read_note(note), device_slot)
            for number, start_ns, end_ns, starts, ends, note, device_slot in values["calls"]
        ]
        values["registrations"] = [Registration(*registration) for registration in values["registrations"]]
        if values["gradients"] is not None:
            total, norms, sharded = values["gradients"]
            by_module = tuple((self._modules[number], norm) for number, norm in norms)
            values["gradients"] = GradientNorms(total, by_module, sharded)
        values["tensor_gradients"] = [TensorGradient(*gradient) for gradient in values["tensor_gradients"]]
        values["collectives"] = [Collective(*collective) for collective in values["collectives"]]
        values["memory"] = [DeviceMemory(*memory) for memory in values["memory"]]
        values["device_times"] = [DeviceTimes(*times) for times in values["device_times"]]
        return StepRecord(**values)


def _encode_log(log: Log) -> tuple[Any, ...]:
    return log.step, log.unix_ns, plain(log.values)


def _phase(phase: Phase) -> tuple[Any, ...]:
    return tuple(phase) if phase.error is None else tuple(phase._replace(error=plain(phase.error)))


def _read_phase(values: tuple[Any, ...]) -> Phase:
    phase = Phase(*values)
    return phase if phase.error is None else phase._replace(error=Error(*phase.error))


def _note(note: CallNote | None) -> tuple[Any, ...] | None:
    return None if note is None else (plain(note.error), *note[1:])


def _read_note(values: tuple[Any, ...] | None) -> CallNote | None:
    if values is None:
        return None
    error, *rest = values
    return CallNote(_optional(Error, error), *rest)


def _optional(kind: Callable[..., Any], values: tuple[Any, ...] | None) -> Any:
    return None if values is None else kind(*values)
