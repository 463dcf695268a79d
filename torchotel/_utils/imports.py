"""Do something when a module is imported, without importing it: Dynamo alone costs 1.4 s and 150 MiB."""

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
"""What is to be done when a module is imported, by its name."""


class _Finder(MetaPathFinder):
    """Find what is waited for as the finders behind this one do, and act once it is loaded.

    `importlib.util.find_spec("torch")`, by which libraries ask whether torch is there, finds and does not load.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _waiting.get(fullname):
            return None
        spec = self._ask_the_rest(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenAct(spec.loader, partial(_act, fullname))
        return spec

    def _ask_the_rest(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        finders = list(sys.meta_path)
        rest = finders[finders.index(self) + 1 :] if self in finders else finders
        for finder in rest:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if spec is not None:
                return spec
        return None


def _act(name: str, module: ModuleType) -> None:
    actions = _waiting.get(name, [])
    while actions:  # one of them may call another off
        actions.pop(0)(module)  # once


class _ThenAct(Loader):
    """Load as the real loader does, then act; leaves no trace on the module."""

    def __init__(self, loader: Loader, action: Action) -> None:
        self._loader, self._action = loader, action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # for those who ask a spec's loader for source, data or resources

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._action(module)

    # Python leaves the import system's frames out of the traceback of a failed import, and knows them by their file.
    exec_module.__code__ = exec_module.__code__.replace(co_filename="<frozen importlib._bootstrap>")


def after_import(name: str, action: Action) -> Callable[[], None]:
    """Run `action` with the module when it is imported, at once where it has been; return what calls that off.

    A finder is put before all others and stays: Python goes through `sys.meta_path` by position, and another thread's
    import would miss the one after a finder that is taken out.
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
