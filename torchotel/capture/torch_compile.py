"""Compiled regions get one span each; hooks are removed while Dynamo compiles or `torch.export` traces."""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from threading import get_ident
from types import ModuleType
from typing import Any

from torch.compiler import is_compiling
from torch.nn import Module

from torchotel._utils.faults import Warn
from torchotel._utils.imports import after_import
from torchotel.capture import torch_internals
from torchotel.capture.hook_manager import ModuleHooks
from torchotel.capture.module_registry import modules_of

Call = Callable[..., Any]

_EXTRA_TIME = r"Using `torch\.compile\(module\)` when there are global hooks on modules"


BESIDE_A_FORWARD = (
    "something is compiled on one thread while another runs a model: hooks are out meanwhile, so spans of that time "
    "are missing or too long. Call what is compiled once, with each of its shapes, before the other threads begin"
)


def _all_modules() -> list[Module]:
    """Return all modules of the process.

    `gc.get_objects` also returns the tuples that other threads build, and `tuple(generator)` raises SystemError if its
    tuple has to grow while it has another reference (https://github.com/python/cpython/issues/59313). So its list lives
    during one call of functions in C, while no other thread runs, and the modules are found by their classes.
    """
    types = set(map(type, chain.from_iterable(map(gc.get_objects, (None,)))))
    classes = [found for found in types if issubclass(found, Module)]
    return [found for found in gc.get_referrers(*classes) if issubclass(type(found), Module)]


UNTRACED = ("capture", "sampling", "tracing", "metrics", "exporters", "worker", "_utils", "_handle", "_session")
"""Packages that run on training threads and that Dynamo must not trace; `_api` and `_lifecycle` check for it."""


class CompileHooks:
    """Remove hooks during compilation, and record the regions made by `module.compile()`.

    `torch.compile(module)` returns another module, which the global hooks see. `module.compile()` sets a compiled call
    that runs no hooks, so that call is wrapped; unpickling and deep copies drop it, as they drop the original.

    Args:
        hooks: The module hooks.
        enter: Called before a region; returns a function that is called after it as a forward hook is.
        compiled: Called with a module that `module.compile()` has compiled.
        guarded: Wraps the callbacks of Dynamo so that they never raise.
        others_forward: Returns whether another thread runs a forward.
        warn: Logs a warning once.
    """

    def __init__(
        self,
        hooks: ModuleHooks,
        enter: Callable[[Module, Any], Call | None],
        compiled: Callable[[Module], None],
        guarded: Callable[[Call], Call],
        others_forward: Callable[[], bool],
        warn: Warn,
    ) -> None:
        self._hooks, self._enter, self._compiled, self._guarded = hooks, guarded(enter), compiled, guarded
        self._others_forward, self._warn = others_forward, warn
        self._suspend, self._resume = guarded(hooks.suspend), guarded(hooks.resume)
        torch_internals.runs_plainly(self._suspend)  # and with it all guarded functions: they share one code object
        self.threads: Counter[int] = Counter()
        """How many compilations run on each thread, by the thread's id; empty if none runs."""
        self._undos = ExitStack()
        self._regions: weakref.WeakSet[_Region] = weakref.WeakSet()  # a region's call keeps its module alive
        self._searched = False
        self._filter: tuple[Any, ...] | None = None

    def install(self) -> None:
        """Install the callbacks of Dynamo and export, now or when they are imported."""
        self.threads.clear()  # a compilation that ran during `uninstall` calls no end
        self._undos.callback(self._restore)
        self._undos.callback(torch_internals.around_module_compile(self._wrap))
        for name, action in (
            ("torch._dynamo.callback", self._dynamo_imported),
            ("torch._dynamo.trace_rules", self._trace_rules_imported),
            ("torch.export._trace", self._export_imported),
        ):
            self._undos.callback(after_import(name, self._guarded(action)))
        # The warning does not apply: these hooks return nothing and skip compiled code.
        warnings.filterwarnings("ignore", message=_EXTRA_TIME, category=UserWarning)
        self._filter = warnings.filters[0]
        self._searched = False
        if torch_internals.has_compiled():
            self._guarded(self._find_regions)()

    def uninstall(self) -> None:
        """Remove all callbacks, and restore the compiled calls of regions."""
        self._undos.close()

    def _restore(self) -> None:
        if self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined] # a list, typed as a sequence
        for region in list(self._regions):
            module = region.module()
            if module is not None and getattr(module, "_compiled_call_impl", None) is region:
                module._compiled_call_impl = region.compiled
        self._regions.clear()

    def _find_regions(self) -> None:
        """Wrap the regions that were compiled before: no hook sees them, and installed hooks would recompile them.

        Only the garbage collector knows all modules, which takes 0.1 s if anything was compiled. After
        `torch._dynamo.reset()` the search is skipped, since nothing is left that could be recompiled.
        """
        if self._searched:
            return
        self._searched = True
        for module in _all_modules():
            self._wrap_if_compiled(module)

    def wrap_regions(self, model: Module) -> None:
        """Wrap the regions of a model that were compiled before."""
        for module in modules_of(model):
            self._wrap_if_compiled(module)

    def _wrap_if_compiled(self, module: Module) -> None:
        compiled = getattr(module, "_compiled_call_impl", None)
        if compiled is not None and not isinstance(compiled, _Region):
            module._compiled_call_impl = self._wrap(module, compiled)

    @property
    def running(self) -> bool:
        """Whether the calling thread compiles; backwards that the compiler traces are not the program's."""
        return self.threads[get_ident()] > 0

    def warn_of_forward(self) -> None:
        """Warn that another thread compiles while the calling thread trains."""
        self._warn(BESIDE_A_FORWARD)

    def _begin(self) -> None:
        self.threads[get_ident()] += 1
        try:
            self._hooks.suspend()
        except Exception:
            self._hooks.remove()  # an export would fail on them
            raise
        if self._others_forward():
            self._warn(BESIDE_A_FORWARD)
        self._find_regions()

    def _end(self) -> None:
        thread = get_ident()
        self.threads[thread] -= 1
        if self.threads[thread] <= 0:
            del self.threads[thread]
        self._hooks.resume()

    def _dynamo_imported(self, callback: ModuleType) -> None:
        begin, end = self._guarded(self._begin), self._guarded(self._end)
        self._undos.callback(torch_internals.around_compilation(callback, begin, end))

    def _trace_rules_imported(self, trace_rules: ModuleType) -> None:
        # Otherwise Dynamo compiles torchotel's functions that run between two graphs of the program.
        for part in UNTRACED:
            torch_internals.keep_untraced(trace_rules, f"torchotel.{part}")

    def _export_imported(self, trace: ModuleType) -> None:
        begin, end = self._guarded(self._begin), self._guarded(self._end)
        self._undos.callback(torch_internals.around_strict_export(trace, begin, end))

    def _wrap(self, module: Module, compiled: Call) -> Call:
        """Wrap a compiled call; if that fails, return the call itself."""
        return self._guarded(self._region)(module, compiled) or compiled

    def _region(self, module: Module, compiled: Call) -> Call:
        self._compiled(module)
        region = _Region(weakref.ref(module), compiled, self._run)
        self._regions.add(region)
        return region

    def _run(self, region: _Region, args: Any, kwargs: Any) -> Any:
        owner = region.module()
        if owner is None or is_compiling():
            return region.compiled(*args, **kwargs)
        after = self._enter(owner, args)
        # Dynamo guards on the hooks: a region is recompiled if a hook was installed since it was compiled.
        self._suspend()
        rest: tuple[Any, ...] = (None,)
        try:
            output = region.compiled(*args, **kwargs)
            rest = (kwargs, output)
        finally:
            self._resume()
            if after is not None and (len(rest) > 1 or isinstance(sys.exception(), Exception)):
                after(owner, args, *rest)
        return output


class _Region:
    """The wrapper of a module's compiled call."""

    __slots__ = ("__weakref__", "_run", "compiled", "module")

    def __init__(self, module: weakref.ref[Module], compiled: Call, run: Callable[[_Region, Any, Any], Any]) -> None:
        self.module, self.compiled, self._run = module, compiled, run

    @torch_internals.runs_region
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self, args, kwargs)
