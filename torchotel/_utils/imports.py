"""Run code when the program imports a module, without importing it: Dynamo alone costs 1.4 s and 150 MiB."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


_waiting: dict[str, list[Action]] = {}
"""Actions by the name of the module whose import they wait for."""


class _Finder(MetaPathFinder):
    """Return the spec of the other finders, with a loader that runs the actions after it has loaded the module.

    The actions do not run on `importlib.util.find_spec("torch")`, which does not load.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _waiting.get(fullname):
            return None
        spec = self._find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ActingLoader(spec.loader, partial(_act, fullname))
        return spec

    def _find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        finders = list(sys.meta_path)
        others = finders[finders.index(self) + 1 :] if self in finders else finders
        for finder in others:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if spec is not None:
                return spec
        return None


def _act(name: str, module: ModuleType) -> None:
    actions = _waiting.get(name, [])
    while actions:  # an action may cancel another action
        actions.pop(0)(module)


class _ActingLoader(Loader):
    """Load a module with its real loader, then run the action; the module keeps its real loader."""

    def __init__(self, loader: Loader, action: Action) -> None:
        self._loader, self._action = loader, action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # libraries read source and resources from a loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._action(module)

    # Python removes frames with this file name from the traceback of a failed import.
    exec_module.__code__ = exec_module.__code__.replace(co_filename="<frozen importlib._bootstrap>")


def after_import(name: str, action: Action) -> Callable[[], None]:
    """Run `action` when the module is imported, or at once if it is; return a function that cancels this.

    The finder is inserted first and never removed: Python iterates over `sys.meta_path` by position, so an import on
    another thread would skip a finder if one before it were removed.
    """
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return lambda: None
    _waiting.setdefault(name, []).append(action)
    if not (sys.meta_path and isinstance(sys.meta_path[0], _Finder)):
        sys.meta_path.insert(0, _Finder())

    def undo() -> None:
        actions = _waiting.get(name, [])
        if action in actions:
            actions.remove(action)

    return undo
