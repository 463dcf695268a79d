"""The plain case of capture in C++, to measure the cost of pure Python. Needs a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from benchmarks.interleave import Mode, Running

ENGINE = "_engine_run_backward"  # private; capture wraps it too
NAME = "minimal capture in C++"
SOURCE = Path(__file__).with_name("native_hooks.cpp")


@cache
def load() -> Any | None:
    """Compile the hooks in a quarter of a minute, or find them compiled. Return None without a working compiler."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    headers = Path(sysconfig.get_path("include"))
    if compiler is None or not (headers / "Python.h").exists():
        return None
    installed = Path(torch.__file__).parent
    include = [headers, installed / "include", installed / "include/torch/csrc/api/include"]
    libraries = [f"-L{installed / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
    words = [compiler, "-std=c++20", "-O2", "-fPIC", "-shared", "-w", *(f"-I{path}" for path in include), str(SOURCE)]
    version = [*words, *libraries, sys.version, torch.__version__, SOURCE.read_text(encoding="utf-8")]
    cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchotel" / "benchmarks"
    library = cached / f"{SOURCE.stem}-{sha256(repr(version).encode()).hexdigest()[:16]}.so"
    if not library.exists():
        cached.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=cached) as unfinished:
            compiled = Path(unfinished) / library.name
            if subprocess.run([*words, *libraries, "-o", str(compiled)], check=False).returncode != 0:
                return None
            compiled.replace(library)
    spec = spec_from_loader(SOURCE.stem, ExtensionFileLoader(SOURCE.stem, str(library)))
    assert spec is not None
    return module_from_spec(spec)


def native_modes() -> list[Mode]:
    """Return the mode if the hooks can be compiled."""
    hooks = load()
    return [] if hooks is None else [Mode(NAME, lambda: on_calls(hooks))]


@contextmanager
def on_calls(hooks: Any) -> Iterator[Running]:
    """Record every call, forward and backward."""
    handles = [register_module_forward_pre_hook(hooks.call_begins), register_module_forward_hook(hooks.call_ends)]
    yield Running(hooks.take)
    for handle in handles:
        handle.remove()


@contextmanager
def on_steps(hooks: Any) -> Iterator[None]:
    """Record the events of a step without detail: outermost calls, backwards and optimizer steps."""
    handles = [
        register_module_forward_pre_hook(hooks.outermost_begins),
        register_module_forward_hook(hooks.outermost_ends),
        register_optimizer_step_pre_hook(hooks.stamp_step),
        register_optimizer_step_post_hook(hooks.stamp_step),
    ]
    hooks.wrap_engine(getattr(torch.autograd, ENGINE))
    with patch.object(torch.autograd, ENGINE, hooks.run_backward):
        yield
    for handle in handles:
        handle.remove()
    hooks.take()
