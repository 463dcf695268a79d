"""Call signatures: shapes, dtypes, device and modes, one object for all calls that look the same."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from torchotel._limits import MAX_SHAPES
from torchotel._records import CallSignature, ModuleInfo
from torchotel._utils.faults import Warn
from torchotel._utils.text import shortened
from torchotel.capture.module_registry import ModuleState, class_of, modules_of
from torchotel.capture.torch_internals import (
    has_gradient_outside,
    is_compiled_function,
    is_outside_dynamo,
    runs_without_parts,
)

MAX_SIGNATURES = 64  # kept a module; with ever new shapes the oldest go
DEEPEST = 8  # containers within containers

LastCall: TypeAlias = tuple[tuple[object, ...], CallSignature]
"""How a call looked, and its signature; one tuple, because other threads call the module too."""

ONE_SPAN = (
    "%s was scripted, traced or exported: it is one span, since the modules that it was made of are not called. "
    "The eager model shows them, and so does torch.export.unflatten() of an exported one"
)


def tensors_in(value: Any, found: list[Tensor] | None = None, depth: int = 0) -> list[Tensor]:
    """Flatten lists, tuples, mappings and dataclasses in order; anything else is skipped."""
    found = [] if found is None else found
    if isinstance(value, Tensor):
        if len(found) < MAX_SHAPES:
            found.append(value)
    elif depth < DEEPEST:
        for item in _items(value):
            tensors_in(item, found, depth + 1)
    return found


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, tuple | list):
        return value
    if isinstance(value, Mapping):
        return value.values()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return ()


class SeenSignatures:
    """The signatures of a module's calls so far, and the module's name in them."""

    __slots__ = ("by_appearance", "info", "last")

    def __init__(self) -> None:
        self.info: ModuleInfo | None = None
        self.by_appearance: dict[object, CallSignature] = {}
        self.last: LastCall | None = None
        """The last call with one tensor in and one out, compared before anything is built."""

    def forget(self) -> None:
        """Forget the calls, but not the name: the module has been compiled in place."""
        self.last = None
        self.by_appearance.clear()

    def of_replica(self) -> SeenSignatures:
        """Return those of a replica, which looks as its original does."""
        seen = SeenSignatures()
        seen.info, seen.by_appearance = self.info, self.by_appearance
        return seen


class CallSignatures:
    """Make and find the `CallSignature` of a call.

    Args:
        warn: Logs a warning once.
        shapes: Whether shapes and dtypes are recorded.
    """

    def __init__(self, warn: Warn, *, shapes: bool) -> None:
        self._warn, self._shapes = warn, shapes

    def find(self, state: ModuleState, module: Module, inputs: list[Tensor], outputs: list[Tensor]) -> CallSignature:
        """Return the signature for these tensors; it is made once."""
        grad_enabled, training = torch.is_grad_enabled(), is_training(module)
        transformed = grad_enabled and any(map(has_gradient_outside, outputs))
        appearance = (
            tuple([(_sizes(t), t.dtype, t.requires_grad) for t in inputs]) if self._shapes else (),
            tuple([(_sizes(t), t.dtype, t.requires_grad) for t in outputs]) if self._shapes else (),
            (outputs or inputs)[0].device if outputs or inputs else None,
            training,
            grad_enabled,
            transformed,
        )
        signature = state.seen.by_appearance.get(appearance)
        if signature is None:
            if len(state.seen.by_appearance) >= MAX_SIGNATURES:
                del state.seen.by_appearance[next(iter(state.seen.by_appearance))]
            signature = state.seen.by_appearance[appearance] = self._make(
                state, module, inputs, outputs, grad_enabled=grad_enabled, transformed=transformed
            )
        return signature

    def find_for_tensor(
        self, state: ModuleState, module: Module, tensor: Tensor, output: Tensor, looks: tuple[object, ...]
    ) -> CallSignature:
        """Return the signature of a call with one tensor in and one out, and remember it as the last one."""
        signature = self.find(state, module, [tensor], [output])
        state.seen.last = looks, signature
        return signature

    def unseen(self, state: ModuleState, module: Module) -> CallSignature:
        """Return the signature of a call whose tensors are not known any more: it has no shapes."""
        info = info_of(state, module)
        device, grad_enabled = _device(module, [], []), torch.is_grad_enabled()
        training = is_training(module)
        appearance = ("unseen", device, training, grad_enabled)
        signature = state.seen.by_appearance.get(appearance)
        if signature is None:
            nothing = (None,) * 6
            signature = CallSignature(info, *nothing, device, training, grad_enabled, is_compiled(module))
            state.seen.by_appearance[appearance] = signature
        return signature

    def _make(
        self,
        state: ModuleState,
        module: Module,
        inputs: list[Tensor],
        outputs: list[Tensor],
        *,
        grad_enabled: bool,
        transformed: bool,
    ) -> CallSignature:
        keep, info = self._shapes, info_of(state, module)
        if not state.seen.by_appearance and runs_without_parts(module):  # checked once, because graphs may be long
            self._warn(ONE_SPAN, info)
        return CallSignature(
            module=info,
            input_shapes=_shapes(inputs) if keep else None,
            output_shapes=_shapes(outputs) if keep else None,
            input_dtypes=_dtypes(inputs) if keep else None,
            output_dtypes=_dtypes(outputs) if keep else None,
            grad_input_shapes=_shapes(t for t in inputs if t.requires_grad) if keep else None,
            grad_output_shapes=_shapes(t for t in outputs if t.requires_grad) if keep else None,
            device=_device(module, inputs, outputs),
            training=is_training(module),
            grad_enabled=grad_enabled,
            compiled=is_compiled(module),
            transformed=transformed,
        )


def is_training(module: Module) -> bool:
    """Return the module's mode; a frozen script has none and counts as evaluating."""
    return getattr(module, "training", False)


def is_compiled(module: Module) -> bool:
    """Return whether a call of the module runs compiled code."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    forward = getattr(module, "forward", None)
    if is_outside_dynamo(forward):
        return False  # `torch.compiler.disable` wraps modules as `torch.compile` does
    return "_orig_mod" in module._modules or is_compiled_function(forward)


def info_of(state: ModuleState, module: Module) -> ModuleInfo:
    """Return a module's description, made once for each of its locations."""
    if state.seen.info is None:
        depth = 0 if state.root else state.path.count(".") + 1
        model, path, kind = (shortened(name) for name in (state.model, state.path, class_of(module)))
        state.seen.info = ModuleInfo(model, path, kind, _own_parameters(module), depth, _holds_parameters(module))
    return state.seen.info


def _own_parameters(module: Module) -> int:
    total = 0
    for parameter in module._parameters.values():
        if parameter is not None and not is_lazy(parameter):
            total += parameter.numel()
    return total


def _holds_parameters(module: Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return True  # a frozen one has made constants of them
    return any(parameter is not None for part in modules_of(module) for parameter in part._parameters.values())


def _device(module: Module, inputs: list[Tensor], outputs: list[Tensor]) -> str:
    held = (t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)
    tensor = next(iter(outputs or inputs), None)
    if tensor is None:
        tensor = next(held, None)
    return sys.intern(str(tensor.device)) if tensor is not None else "cpu"


def _shapes(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    return tuple(shape_of(t) for t in tensors)


def shape_of(tensor: Tensor) -> str:
    """Write a tensor's shape: `8x3x224x224`, "scalar" for one without dimensions."""
    return "x".join(map(str, _sizes(tensor))) or "scalar"


def _sizes(tensor: Tensor) -> tuple[int | str, ...]:
    """Return the tensor's shape; a ragged dimension of a nested tensor is "*"."""
    if not tensor.is_nested:
        return tensor.shape
    return tuple([_size(tensor, dimension) for dimension in range(tensor.dim())])


def _size(tensor: Tensor, dimension: int) -> int | str:
    try:
        size = tensor.size(dimension)
    except RuntimeError:  # strided layout; the jagged one has a symbol
        return "*"
    return size if type(size) is int else "*"


def _dtypes(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    return tuple(str(t.dtype).removeprefix("torch.") for t in tensors)
