"""Run a script or a module as `python` does."""

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
"""Script name that means standard input."""

_OWN_FILES = frozenset({__file__, "<frozen runpy>", runpy.__file__})


@dataclass(frozen=True)
class Program:
    """A script, or with `module` a module's name, and its arguments."""

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False

    @property
    def name(self) -> str:
        """Return the script's name without its extension, or the module's name."""
        if self.target == STDIN:
            return "stdin"
        return self.target if self.module else Path(self.target).resolve().stem

    def prepare(self) -> None:
        """Set `sys.argv` and `sys.path[0]` for the program, permanently."""
        sys.argv[:] = [self.target, *self.arguments]
        if not sys.flags.safe_path:  # with -P, Python adds no entry at the front that would have to be removed
            del sys.path[0]
            if self.module:
                sys.path.insert(0, str(Path.cwd()))
            elif self.target == STDIN:
                sys.path.insert(0, "")
            elif not _is_package(self.target):
                sys.path.insert(0, str(Path(self.target).resolve().parent))
        if not self.module and _is_package(self.target):  # `python -P` adds this entry, too
            sys.path.insert(0, os.path.abspath(self.target))  # noqa: PTH100 - Path.absolute keeps `..`

    def run(self) -> int:
        """Run the program and return its exit code: 0, or 1 if it raised an exception, which is printed as Python does.

        Python itself then waits for threads and runs `atexit` functions.

        Raises:
            SystemExit: The program raised it.
            KeyboardInterrupt: The program was interrupted; the traceback has been printed.
        """
        error = self._run_catching()
        if error is None:
            return 0
        if not isinstance(error, SystemExit):
            _print(error)
        if isinstance(error, KeyboardInterrupt):
            sys.excepthook = lambda *_: None  # the traceback has been printed
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise error  # Python then ends by SIGINT, by which a shell knows that its loop ends too
        return 1

    def _run_catching(self) -> BaseException | None:
        """Run the program and return its exception, since Python calls `sys.excepthook` outside the handling of it."""
        try:
            if self.module:
                _run_module(self.target)
            elif _is_package(self.target):
                _run_module("__main__", alter_argv=False)  # from the folder or archive at the front of sys.path
            else:
                _run_script(self.target)
        except BaseException as error:  # noqa: BLE001 - any exception of the program ends the program only
            return error
        return None


def is_runnable(path: str) -> bool:
    """Return whether the path is standard input, or a readable script, folder or archive."""
    return path == STDIN or os.access(path, os.R_OK)


def _is_package(path: str) -> bool:
    return Path(path).is_dir() or zipfile.is_zipfile(path)


def _run_script(path: str) -> None:
    # runpy.run_path would remove __main__ before `atexit` functions and workers of a pool have used it.
    module = _new_main()
    # Python keeps links and `..` in __file__.
    file = "<stdin>" if path == STDIN else os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118 - Path drops dots
    module.__dict__.update(__file__=file, __cached__=None)
    code = _compile(sys.stdin.buffer.read(), file) if path == STDIN else _read_code(file, module)
    exec(code, module.__dict__)  # noqa: S102 - the user's own program


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
    # `python -m` calls this function. runpy.run_module would remove __main__ before `atexit` functions run.
    run: Any = vars(runpy)["_run_module_as_main"]
    run(name, alter_argv)


def _new_main() -> ModuleType:
    """Create `__main__`, in which pickle and the workers of a DataLoader find the program's functions and classes."""
    module = ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = module
    return module


def _print(error: BaseException) -> None:
    trace = _strip_own_frames(error.__traceback__)
    error = error.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace  # as Python sets them
    try:
        sys.excepthook(type(error), error, trace)
    except Exception as raised:  # noqa: BLE001 - the program's own hook failed, and Python continues, too
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exception(raised.with_traceback(_strip_own_frames(raised.__traceback__)))
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, trace)


def _strip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
        trace = trace.tb_next
    return trace
