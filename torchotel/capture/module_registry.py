"""The state and the name of each module: its path in its model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch.nn import Module
from torch.nn.parameter import is_lazy

from torchotel._records import ModelInfo
from torchotel._utils.text import shortened
from torchotel.capture.torch_internals import is_generated

if TYPE_CHECKING:
    from torchotel.capture.autograd_hooks import NodePath
    from torchotel.capture.call_signatures import SeenSignatures

WRAPPERS = {
    "module": {"DistributedDataParallel", "DataParallel", "AveragedModel"},
    "_orig_mod": {"OptimizedModule"},
    "_fsdp_wrapped_module": {"FullyShardedDataParallel"},
    "_checkpoint_wrapped_module": {"ActivationWrapper", "CheckpointWrapper", "OffloadWrapper"},
}
"""Attributes that hold the wrapped module, and the classes of wrappers that have them."""
SHARDING_BASES = {"FSDPModule": "FSDP", "ReplicateModule": "Replicate"}
"""First bases of the classes that `fully_shard` and `replicate` give modules, and the prefix of those classes."""


def modules_of(root: Module) -> Iterator[Module]:
    """Yield a module and all its submodules once; unlike `Module.modules`, also modules without a hash."""
    seen: set[int] = set()
    todo = [root]
    while todo:
        module = todo.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            todo += [child for child in reversed(module._modules.values()) if child is not None]


def walk(top: Module, path: str) -> Iterator[tuple[Module, str, Module | None, str]]:
    """Yield each module once, in `named_modules` order: module, stripped path, holder, and its name there."""
    seen: set[int] = set()
    todo: list[tuple[Module, str, Module | None, str]] = [(top, path, None, "")]
    while todo:
        module, path, holder, name = todo.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield module, path, holder, name
        for child_name, child in reversed(module._modules.items()):
            if child is not None:
                below = path if wraps(module, child_name) else f"{path}.{child_name}" if path else child_name
                todo.append((child, below, module, child_name))


def holds(holder: Module, name: str, module: Module) -> bool:
    """Return whether a module holds another under a name; a scripted one's dictionary has no `get`."""
    return name in holder._modules and holder._modules[name] is module


def wraps(module: Module, name: str) -> bool:
    """Return whether a module is a wrapper that holds the wrapped module under a name."""
    classes = WRAPPERS.get(name)
    return classes is not None and any(base.__name__ in classes for base in type(module).__mro__)


def unwrapped(module: Module) -> Module:
    """Return the wrapped module, or the module itself if it is no wrapper."""
    while True:
        inner = next((child for name, child in module._modules.items() if wraps(module, name)), None)
        if inner is None:
            return module
        module = inner


def class_of(module: Module) -> str:
    """Return the name of a module's class; `fully_shard` and `replicate` replace the class by a subclass."""
    kind = type(module)
    prefix = SHARDING_BASES.get(kind.__bases__[0].__name__)
    if prefix is not None and kind.__name__ == prefix + kind.__bases__[-1].__name__:
        kind = kind.__bases__[-1]
    return kind.__name__


class ModuleLocation(NamedTuple):
    """The location of a module and the name that follows from it."""

    model: str
    path: str
    holder: weakref.ref[Module] | None
    """None: no module holds it."""
    name: str
    """The name under which the holder has it."""
    root: bool
    """Whether only wrappers hold it: paths begin below it."""


class ModuleState:
    """The state of one living module: its location, and objects of other parts of capture.

    Args:
        reference: The module.
        location: The module's location.
        seen: The signatures of its calls.
        nodes: The cached path through the nodes of its calls.
    """

    __slots__ = (
        "__weakref__", "callers", "holder", "model", "name", "nodes", "path", "reference", "root", "seen", "skipped",
    )  # fmt: skip

    def __init__(
        self, reference: weakref.ref[Module], location: ModuleLocation, seen: SeenSignatures, nodes: NodePath
    ) -> None:
        self.reference = reference
        self.skipped = False
        self.callers: set[int] = set()
        """Ids of the modules that were seen to call it."""
        self.move(location, seen, nodes)

    def move(self, location: ModuleLocation, seen: SeenSignatures, nodes: NodePath) -> None:
        """Give the module another location, and drop the state of the old one."""
        self.model, self.path, self.holder, self.name, self.root = location
        self.seen, self.nodes = seen, nodes

    def in_place(self, module: Module) -> bool:
        """Return whether the module is still at its location."""
        if self.holder is None:
            return True
        holder = self.holder()
        return holder is not None and holds(holder, self.name, module)

    def path_below(self, name: str) -> str:
        """Return the path of a child or a parameter of the module."""
        return name if self.root else f"{self.path}.{name}"


class ModuleRegistry:
    """The states of all modules that were called or belong to a model that was called.

    Args:
        new_seen: Makes the object in which `call_signatures` keeps its state of a module.
        new_nodes: Makes the object in which `autograd_hooks` keeps its state of a module.
    """

    def __init__(self, new_seen: Callable[[], SeenSignatures], new_nodes: Callable[[], NodePath]) -> None:
        self._new_seen, self._new_nodes = new_seen, new_nodes
        self.on_model_named: Callable[[Module], None] = lambda _: None
        """Called with the module of a root call whose model was named."""
        self.states: dict[int, ModuleState] = {}
        self.stale = False
        """Whether a module was added to a known model: the next root call names the model again."""
        self._owners: dict[int, tuple[weakref.ref[Module], weakref.ref[Module], str]] = {}
        self._roots: dict[int, str] = {}
        self._hidden: set[int] = set()
        """Modules that no module holds, and those below them: their names follow their caller's."""

    def register_model(self, root: Module) -> ModuleState:
        """Name every module below the root, and the root by its class."""
        return self._register(root, self._model_name(root), "")

    def name(self, model: Module, name: str) -> bool:
        """Name a model, with `-2` … if the name is in use; return False for a part of another module."""
        top = self.topmost(model)
        root = unwrapped(top)
        if root is not unwrapped(model):
            return False
        self._roots.pop(id(root), None)
        self._roots[id(root)] = self._unused(shortened(name))
        self.register_model(top)
        return True

    def compiled(self, module: Module) -> None:
        """Forget the signatures of a module's calls, after it was compiled in place."""
        state = self.states.get(id(module))
        if state is not None:
            state.seen.forget()

    def describe(self, module: Module) -> ModelInfo:
        """Describe the model that a module is part of."""
        root = self.topmost(module)
        modules = list(modules_of(root))
        held = {id(p): p for m in modules for p in m._parameters.values() if p is not None and not is_lazy(p)}
        name = self._roots.get(id(unwrapped(root)), class_of(unwrapped(root)))
        return ModelInfo(shortened(name), len(modules), sum(p.numel() for p in held.values()))

    def enter(self, module: Module) -> None:
        """Name the model of a root call, again if it has changed since."""
        state = self.states.get(id(module))
        if state is not None and not self.stale and (state.holder is None or state.in_place(module)):
            return
        self.stale = False
        self.register_model(self.topmost(module))
        if id(module) not in self.states:
            self.register_model(module)
        self.on_model_named(module)

    def find(self, module: Module, callers: Sequence[Module]) -> ModuleState:
        """Name a module that is unknown or has moved; `callers` are the enclosing calls' modules, outermost first."""
        state = self.states.get(id(module))
        held = any(child is module for caller in callers for child in caller._modules.values())
        # Otherwise `forward` made the module, and naming the model at every call would be slow.
        if self.stale or held or state is not None or not callers:
            self.register_model(self.topmost(callers[0] if callers else module))
            state = self.states.get(id(module))
            if state is not None and state.in_place(module):
                return state
        if not callers:
            return self.register_model(module)
        # The module or its caller is held by a plain list or a closure.
        parent = self.states.get(id(callers[-1]))
        if parent is None or not parent.in_place(callers[-1]):
            parent = self.find(callers[-1], callers[:-1])
            state = self.states.get(id(module))
            if state is not None and state.in_place(module):
                return state
        return self._register(module, parent.model, parent.path_below(class_of(module)))

    def registered(self, owner: Module, name: str, child: Module) -> None:
        """Remember the holder of a module, so that a root which is never called still names its parts."""
        key = id(child)
        reference = weakref.ref(child, lambda _: self._owners.pop(key, None))
        self._owners[key] = (reference, weakref.ref(owner), name)
        if id(owner) in self.states:
            self.stale = True

    def known(self, module: Module) -> str | None:
        """Return the path of a known module; None for an unknown module or a part of a compiled region."""
        state = self.states.get(id(module))
        return None if state is None or state.skipped or state.reference() is not module else state.path

    def path_below(self, owner: Module, name: str) -> str | None:
        """Return the path of a child or a parameter of a known module; None for an unknown module."""
        state = self.states.get(id(owner))
        return None if state is None else state.path_below(name)

    def _register(self, top: Module, model: str, path: str) -> ModuleState:
        """Name a module and all below it; an empty path is a root's."""
        title = class_of(unwrapped(top))
        moved = False
        for module, below, holder, name in walk(top, path):
            reference = None if holder is None else weakref.ref(holder)
            location = ModuleLocation(model, below or title, reference, name, root=not below)
            state = self.states.get(id(module))
            if state is None:
                self.add(module, location)
            elif not (_same(state, location) and state.in_place(module)) and not self._belongs_elsewhere(module, top):
                if below:
                    self._roots.pop(id(module), None)
                moved = True
                state.move(location, self._new_seen(), self._new_nodes())
            if path:
                self._hidden.add(id(module))
        if moved and not path:  # their callers may have moved: they are named again when they are called
            for key in self._hidden:
                self.states.pop(key, None)
            self._hidden.clear()
        return self.states[id(top)]

    def add(self, module: Module, location: ModuleLocation) -> ModuleState:
        """Name a module that is unknown."""
        key = id(module)

        def gone(_: object) -> None:
            self.states.pop(key, None)
            self._roots.pop(key, None)
            self._hidden.discard(key)

        state = self.states[key] = ModuleState(weakref.ref(module, gone), location, self._new_seen(), self._new_nodes())
        state.skipped = is_generated(module)
        return state

    def _belongs_elsewhere(self, module: Module, top: Module) -> bool:
        """Return whether a module is still part of another living model, and keeps the name there."""
        state = self.states.get(id(module))
        if state is None or state.holder is None:
            return False
        while state is not None and state.holder is not None:
            holder = state.holder()
            if holder is None or holder is top or not state.in_place(module):
                return False
            module, state = holder, self.states.get(id(holder))
        return state is not None and state.root

    def _model_name(self, root: Module) -> str:
        root = unwrapped(root)
        name = self._roots.get(id(root))
        if name is None:
            name = self._roots[id(root)] = self._unused(class_of(root))
        return name

    def _unused(self, name: str) -> str:
        taken, number, unused = set(self._roots.values()), 1, name
        while unused in taken:
            number += 1
            unused = f"{name}-{number}"
        return unused

    def _holder_of(self, module: Module) -> Module | None:
        state = self.states.get(id(module))
        if state is not None and state.holder is not None and state.in_place(module):
            return state.holder()
        entry = self._owners.get(id(module))
        if entry is None:
            return None
        owner = entry[1]()
        return owner if owner is not None and holds(owner, entry[2], module) else None

    def topmost(self, module: Module) -> Module:
        """Return the outermost known holder of a module."""
        seen = {id(module)}
        while (holder := self._holder_of(module)) is not None and id(holder) not in seen:
            module = holder
            seen.add(id(module))
        return module


def _same(state: ModuleState, location: ModuleLocation) -> bool:
    return (state.model, state.path, state.name, state.root) == (
        location.model,
        location.path,
        location.name,
        location.root,
    )
