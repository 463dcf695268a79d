"""Run a script or a module as `python` itself would."""

import builtins
import io
import os
import pkgutil
import runpy
import sys
import traceback
import zipfile
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

STDIN = "-"
"""Stands for a script that is read from standard input."""

_OURS = frozenset({__file__, "<frozen runpy>", runpy.__file__})


@dataclass(frozen=True)
class Program:
    """A script, or with `module` a module's name, and its arguments."""

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False

    @property
    def name(self) -> str:
        """A short name: the script's without its ending, or the module's."""
        if self.target == STDIN:
            return "stdin"
        return self.target if self.module else Path(self.target).resolve().stem

    def prepare(self) -> None:
        """Set `sys.argv` and `sys.path[0]`, which stay as they are when the program has ended."""
        sys.argv[:] = [self.target, *self.arguments]
        if not sys.flags.safe_path:  # else nothing stands at the front that would have to go
            del sys.path[0]
            if self.module:
                sys.path.insert(0, str(Path.cwd()))
            elif self.target == STDIN:
                sys.path.insert(0, "")
            elif not _is_package(self.target):
                sys.path.insert(0, str(Path(self.target).resolve().parent))
        if not self.module and _is_package(self.target):  # `python -P` puts that there, too
            sys.path.insert(0, os.path.abspath(self.target))  # noqa: PTH100 - Path.absolute keeps the dots

    def run(self) -> int:
        """Run it to its last line and give its exit code: 0, or 1 where it raised, which is printed as python does.

        What else ends a program, python knows how to do: threads are waited for, and `atexit` is run, after this.

        Raises:
            SystemExit: The program's own.
            KeyboardInterrupt: It was interrupted, and that has been printed.
        """
        error = self._run_to_its_end()
        if error is None:
            return 0
        if not isinstance(error, SystemExit):
            _print(error)
        if isinstance(error, KeyboardInterrupt):
            sys.excepthook = lambda *_: None  # it need not be told twice
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise error  # python then ends by the signal, by which shells know that a loop of theirs ends too
        return 1

    def _run_to_its_end(self) -> BaseException | None:
        """Run it, and give what it raised: python calls `sys.excepthook` when that is no longer being handled."""
        try:
            if self.module:
                _run_module(self.target)
            elif _is_package(self.target):
                _run_module("__main__", alter_argv=False)  # of the folder or archive at the front of sys.path
            else:
                _run_script(self.target)
        except BaseException as error:  # noqa: BLE001 - whatever ends a program ends it here
            return error
        return None


def is_runnable(path: str) -> bool:
    """Whether there is a script, or a folder or an archive with a `__main__.py`, that may be read."""
    return path == STDIN or os.access(path, os.R_OK)


def _is_package(path: str) -> bool:
    return Path(path).is_dir() or zipfile.is_zipfile(path)


def _run_script(path: str) -> None:
    # runpy.run_path would take __main__ away when it ends, before atexit and a pool's workers look for it.
    module = _new_main()
    # As python makes it: links and dots are kept.
    file = "<stdin>" if path == STDIN else os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118 - Path drops dots
    module.__dict__.update(__file__=file, __cached__=None)
    code = _compile(sys.stdin.buffer.read(), file) if path == STDIN else _read_code(file, module)
    exec(code, module.__dict__)  # noqa: S102 - the user's own


def _read_code(path: str, module: ModuleType) -> CodeType:
    with io.open_code(path) as file:
        code: CodeType | None = pkgutil.read_code(file)
        if code is not None:
            module.__loader__ = SourcelessFileLoader("__main__", path)
            return code
        file.seek(0)
        module.__loader__ = SourceFileLoader("__main__", path)
        return _compile(file.read(), path)


def _compile(source: bytes, name: str) -> CodeType:
    return compile(source, name, "exec", dont_inherit=True)


def _run_module(name: str, *, alter_argv: bool = True) -> None:
    _new_main()
    # What `python -m` itself calls. run_module would take __main__ away when it ends, before atexit runs.
    run: Any = vars(runpy)["_run_module_as_main"]
    run(name, alter_argv)


def _new_main() -> ModuleType:
    """Put a module where pickling and the workers of a DataLoader look for the program's own names."""
    module = ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = module
    return module


def _print(error: BaseException) -> None:
    trace = _without_ours(error.__traceback__)
    error = error.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace  # as python leaves them
    try:
        sys.excepthook(type(error), error, trace)
    except Exception as raised:  # noqa: BLE001 - the hook is the program's, and python goes on after it too
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exception(raised.with_traceback(_without_ours(raised.__traceback__)))
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, trace)


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    return trace
