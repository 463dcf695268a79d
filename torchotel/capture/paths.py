"""Which name a module has: its qualified path under the root that holds it, wrappers stripped.

Nothing is kept on modules and none is kept alive: states are found by `id()` and dropped by a weak reference's
callback. Identity, not a name, is the truth: `parent._modules[name] is module` is checked at each call.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy

from torchotel._records import ModelInfo
from torchotel.capture.seams import is_generated

if TYPE_CHECKING:
    from torchotel._records import CallSite, ModuleInfo

WRAPPERS = {
    "module": {"DistributedDataParallel", "DataParallel", "AveragedModel"},
    "_orig_mod": {"OptimizedModule"},
    "_fsdp_wrapped_module": {"FullyShardedDataParallel"},
    "_checkpoint_wrapped_module": {"ActivationWrapper", "CheckpointWrapper", "OffloadWrapper"},
}
"""Attributes that hold what a wrapper wraps, and the classes for which that is so."""


class ModuleState:
    """What is known of one living module; also keeps what its last call looked like."""

    __slots__ = (
        "__weakref__",
        "device_index",
        "grad_enabled",
        "holder",
        "info",
        "input_grad",
        "input_shape",
        "input_type",
        "model",
        "name",
        "offset",
        "output_grad",
        "output_shape",
        "output_type",
        "path",
        "reference",
        "site",
        "sites",
        "skipped",
        "span",
        "training",
        "way",
    )

    def __init__(
        self,
        reference: weakref.ref[Module],
        model: str,
        path: str,
        holder: weakref.ref[Module] | None,
        name: str,
    ) -> None:
        self.reference = reference
        self.skipped = False
        self.rename(model, path, holder, name)

    def rename(self, model: str, path: str, holder: weakref.ref[Module] | None, name: str) -> None:
        """Give the module another place; what was kept under the old name goes."""
        self.model, self.path, self.holder, self.name = model, path, holder, name
        self.info: ModuleInfo | None = None
        self.sites: dict[object, CallSite] = {}
        # The last call with one tensor in and one out, compared before anything is built.
        self.site: CallSite | None = None
        self.input_shape: torch.Size | None = None
        self.output_shape: torch.Size | None = None
        self.input_type: torch.dtype | None = None
        self.output_type: torch.dtype | None = None
        self.input_grad = self.output_grad = self.training = self.grad_enabled = False
        self.device_index = -2
        # The remembered way from its output node to its lowest node, checked by sequence numbers.
        self.way: tuple[int, ...] | None = None
        self.offset = self.span = 0

    def in_place(self, module: Module) -> bool:
        """Tell whether the module still stands where its name says."""
        if self.holder is None:
            return True
        holder = self.holder()
        return holder is not None and holder._modules.get(self.name) is module


class Paths:
    """The states of all modules that were called or stand in a model that was."""

    def __init__(self) -> None:
        self.states: dict[int, ModuleState] = {}
        self.stale = False
        """A module came to a known model: the next outermost call looks again."""
        self._owners: dict[int, tuple[weakref.ref[Module], weakref.ref[Module], str]] = {}
        self._roots: dict[int, str] = {}

    def learn(self, root: Module) -> ModuleState:
        """Name every module below the root, and the root by its class."""
        model = self._model_name(root)
        title = _class_of(_unwrapped(root))
        for module, path, holder, name in _walk(root):
            shown = path or title
            state = self.states.get(id(module))
            reference = None if holder is None else weakref.ref(holder)
            if state is None:
                self._add(module, model, shown, reference, name)
            elif (state.model, state.path, state.name) != (model, shown, name) or not state.in_place(module):
                if holder is not None:
                    self._roots.pop(id(module), None)
                state.rename(model, shown, reference, name)
        return self.states[id(root)]

    def describe(self, module: Module) -> ModelInfo:
        """Describe the model that a module is part of."""
        root = self._topmost(module)
        parameters = sum(p.numel() for p in root.parameters() if not is_lazy(p))
        return ModelInfo(_class_of(_unwrapped(root)), sum(1 for _ in root.modules()), parameters)

    def enter(self, module: Module) -> bool:
        """Name the model of an outermost call, again where it has changed since; return whether it was."""
        state = self.states.get(id(module))
        if state is not None and not self.stale and state.in_place(module):
            return False
        self.stale = False
        self.learn(self._topmost(module))
        if id(module) not in self.states:
            self.learn(module)
        return True

    def find(self, module: Module, callers: Sequence[Module]) -> ModuleState:
        """Name a module that is unknown or has moved; `callers` are the calls that enclose it, outermost first."""
        state = self.states.get(id(module))
        root = self._topmost(callers[0] if callers else module)
        self.learn(root)
        found = self.states.get(id(module))
        if found is not None and found.in_place(module):
            return found
        if not callers:
            return self.learn(module)
        parent = self.states.get(id(callers[-1]))  # called, but held by no module: a plain list, a closure
        prefix = f"{parent.path}." if parent is not None and parent.holder is not None else ""
        model = parent.model if parent is not None else _class_of(module)
        if state is not None:
            state.rename(model, prefix + _class_of(module), None, "")
            return state
        return self._add(module, model, prefix + _class_of(module), None, "")

    def registered(self, owner: Module, name: str, child: Module) -> None:
        """Remember who holds a module, so that a root which is never called still gives its names."""
        key = id(child)
        reference = weakref.ref(child, lambda _: self._owners.pop(key, None))
        self._owners[key] = (reference, weakref.ref(owner), name)
        if id(owner) in self.states:
            self.stale = True

    def path_below(self, owner: Module, name: str) -> str | None:
        """Path of what a known module holds under a name; None for an unknown module."""
        state = self.states.get(id(owner))
        if state is None:
            return None
        return f"{state.path}.{name}" if state.holder is not None and not _is_root(state) else name

    def _add(self, module: Module, model: str, path: str, holder: weakref.ref[Module] | None, name: str) -> ModuleState:
        key = id(module)

        def gone(_: object) -> None:
            self.states.pop(key, None)
            self._roots.pop(key, None)

        state = self.states[key] = ModuleState(weakref.ref(module, gone), model, path, holder, name)
        state.skipped = is_generated(module)
        return state

    def _model_name(self, root: Module) -> str:
        name = self._roots.get(id(root))
        if name is None:
            title, taken = _class_of(_unwrapped(root)), set(self._roots.values())
            name, number = title, 1
            while name in taken:
                number += 1
                name = f"{title}-{number}"
            self._roots[id(root)] = name
        return name

    def _topmost(self, module: Module) -> Module:
        """Follow registrations up to the module that nobody holds."""
        seen = {id(module)}
        while (entry := self._owners.get(id(module))) is not None:
            owner = entry[1]()
            if owner is None or owner._modules.get(entry[2]) is not module or id(owner) in seen:
                break
            module = owner
            seen.add(id(module))
        return module


def _walk(root: Module) -> Iterator[tuple[Module, str, Module | None, str]]:
    """Yield each module once: its stripped path, who holds it and under which name, in `named_modules` order."""
    seen: set[int] = set()
    todo: list[tuple[Module, str, Module | None, str]] = [(root, "", None, "")]
    while todo:
        module, path, holder, name = todo.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield module, path, holder, name
        for child_name, child in reversed(module._modules.items()):
            if child is not None:
                below = path if _wraps(module, child_name) else f"{path}.{child_name}" if path else child_name
                todo.append((child, below, module, child_name))


def _wraps(module: Module, name: str) -> bool:
    classes = WRAPPERS.get(name)
    return classes is not None and any(base.__name__ in classes for base in type(module).__mro__)


def _unwrapped(module: Module) -> Module:
    while True:
        inner = next((child for name, child in module._modules.items() if child and _wraps(module, name)), None)
        if inner is None:
            return module
        module = inner


def _is_root(state: ModuleState) -> bool:
    """Tell whether only wrappers hold it."""
    return "." not in state.path and state.name in WRAPPERS


def _class_of(module: Module) -> str:
    return type(module).__name__
