"""The tree of modules, walked by identity, its wrappers stripped from paths."""

from __future__ import annotations

from collections.abc import Iterator

from torch.nn import Module

WRAPPERS = {
    "module": {"DistributedDataParallel", "DataParallel", "AveragedModel"},
    "_orig_mod": {"OptimizedModule"},
    "_fsdp_wrapped_module": {"FullyShardedDataParallel"},
    "_checkpoint_wrapped_module": {"ActivationWrapper", "CheckpointWrapper", "OffloadWrapper"},
}
"""Attributes that hold what a wrapper wraps, and the classes for which that is so."""
SHARDING_BASES = {"FSDPModule": "FSDP", "ReplicateModule": "Replicate"}
"""First bases of the classes that `fully_shard` and `replicate` give modules, and the prefix of those classes."""


def modules_of(root: Module) -> Iterator[Module]:
    """Yield a module and all below it once, as `Module.modules` does where every module has a hash."""
    seen: set[int] = set()
    todo = [root]
    while todo:
        module = todo.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            todo += [child for child in reversed(module._modules.values()) if child is not None]


def walk(top: Module, path: str) -> Iterator[tuple[Module, str, Module | None, str]]:
    """Yield each module once: its stripped path, who holds it and under which name, in `named_modules` order."""
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
    """Tell whether a module holds another under a name; a scripted one's dictionary has no `get`."""
    return name in holder._modules and holder._modules[name] is module


def wraps(module: Module, name: str) -> bool:
    """Tell whether a module is a wrapper, and what it holds under a name what it wraps."""
    classes = WRAPPERS.get(name)
    return classes is not None and any(base.__name__ in classes for base in type(module).__mro__)


def unwrapped(module: Module) -> Module:
    """Return what a module wraps, itself where it is no wrapper."""
    while True:
        inner = next((child for name, child in module._modules.items() if wraps(module, name)), None)
        if inner is None:
            return module
        module = inner


def class_of(module: Module) -> str:
    """Return the name of a module's class; `fully_shard` and `replicate` put one of their own in its place."""
    kind = type(module)
    prefix = SHARDING_BASES.get(kind.__bases__[0].__name__)
    if prefix is not None and kind.__name__ == prefix + kind.__bases__[-1].__name__:
        kind = kind.__bases__[-1]
    return kind.__name__
