"""Run a script or a module as `python` itself would."""

import builtins
import io
import os
import runpy
import sys
import threading
import zipfile
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

INTERRUPTED = 130
"""What a shell reports of a program that Ctrl-C ended."""

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
        return self.target if self.module else Path(self.target).resolve().stem

    def prepare(self) -> None:
        """Set `sys.argv` and `sys.path[0]`, which stay as they are when the program has ended."""
        sys.argv[:] = [self.target, *self.arguments]
        if sys.flags.safe_path:
            return  # python -P: nothing stands at the front that would have to go
        if self.module:
            sys.path[0] = str(Path.cwd())
        elif _is_script(self.target):
            sys.path[0] = str(Path(self.target).resolve().parent)
        else:
            del sys.path[0]  # runpy puts a folder or an archive there itself

    def run(self) -> int:
        """Run it to its end and give its exit code; what it raises is printed as python prints it."""
        try:
            if self.module:
                _run_module(self.target)
            elif _is_script(self.target):
                _run_script(self.target)
            else:
                runpy.run_path(self.target, run_name="__main__")
            _join_threads()
        except SystemExit as error:
            return _exit_code(error)
        except BaseException as error:  # noqa: BLE001 - whatever ends a program ends it here
            _print(error)
            return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        return 0


def _is_script(path: str) -> bool:
    """Whether it is source, and not a folder, an archive or compiled code, which runpy knows how to run."""
    return Path(path).is_file() and not zipfile.is_zipfile(path) and not path.endswith(".pyc")


def _run_script(path: str) -> None:
    # runpy.run_path would change sys.argv[0] or leave __file__ relative.
    absolute = str(Path(path).absolute())  # as python makes it: links and .. are kept
    with io.open_code(absolute) as file:
        source = file.read()
    module = _new_main()
    module.__file__ = absolute
    module.__loader__ = SourceFileLoader("__main__", absolute)
    module.__dict__["__cached__"] = None
    exec(compile(source, absolute, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - the user's own


def _run_module(name: str) -> None:
    _new_main()
    # What `python -m` itself calls. run_module would take __main__ away when it ends, before atexit runs.
    run: Any = vars(runpy)["_run_module_as_main"]
    run(name)


def _new_main() -> ModuleType:
    """Put a module where pickling and the workers of a DataLoader look for the program's own names."""
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    return module


def _join_threads() -> None:
    # A program lasts as long as its threads; python waits for them after the last line too.
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return int(error.code or 0)
    print(error.code, file=sys.stderr)
    return 1


def _print(error: BaseException) -> None:
    trace = _without_ours(error.__traceback__)
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except Exception:  # noqa: BLE001 - the hook is the program's, and python goes on after it too
        sys.__excepthook__(type(error), error, trace)


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    return trace


def is_runnable(path: str) -> bool:
    """Whether there is a script, or a folder or an archive with a `__main__.py`, that may be read."""
    return os.access(path, os.R_OK)
