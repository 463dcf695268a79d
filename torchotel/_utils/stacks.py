"""Read the Python stacks of all threads, without the paths of files."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import PurePath
from types import FrameType
from typing import Final

from torchotel._collectives import CodeLine, ThreadStack
from torchotel._utils.text import shortened

MAX_THREADS: Final = 16
MAX_FRAMES: Final = 24
"""Frames of a thread."""
MAX_PART: Final = 100
"""Characters of a name: all stacks are one packet of the connection to the companion."""
_PACKAGE: Final = PurePath(__file__).parents[1]
_LIBRARIES: Final = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
)
"""Folders of Python's own code, of installed packages and of their commands, such as `torchrun`."""
_CALLERS: Final = {"<frozen runpy>", str(_PACKAGE / "cli" / "python_program.py")}


def thread_stacks() -> Iterator[ThreadStack]:
    """Yield the stacks of the threads of the program, the main thread first."""
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    frames, main = sys._current_frames(), threading.main_thread().ident  # noqa: SLF001  # documented
    ours = {ident for ident, name in threads.items() if name.startswith("torchotel")}
    for ident in sorted(frames.keys() - ours, key=lambda ident: ident != main)[:MAX_THREADS]:
        name = shortened(threads.get(ident, f"thread {ident}"), MAX_PART)
        yield ThreadStack(name, tuple(islice(_lines(frames[ident]), MAX_FRAMES)))


def code_line(path: str, line: int, function: str) -> CodeLine:
    """Return a line of code with the path of the file below `site-packages`, or else its base name."""
    return CodeLine(shortened(_public_path(PurePath(path)), MAX_PART), line, shortened(function, MAX_PART))


def is_program(path: str) -> bool:
    """Return whether a file of code belongs to the program, and not to Python, an installed package or torchotel."""
    is_library = path.startswith(("<", *_LIBRARIES)) or "site-packages" in path
    return not is_library and not PurePath(path).is_relative_to(_PACKAGE)


def _public_path(path: PurePath) -> str:
    if "site-packages" in path.parts:
        return "/".join(path.parts[path.parts.index("site-packages") + 1 :])
    if path.is_relative_to(_PACKAGE):  # installed in editable mode
        return str(path.relative_to(_PACKAGE.parent))
    return path.name


def _lines(frame: FrameType | None) -> Iterator[CodeLine]:
    """Yield the lines from the innermost one to the program's first: `torchotel run` and runpy have called that."""
    while frame is not None and frame.f_code.co_filename not in _CALLERS:
        yield code_line(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)
        frame = frame.f_back
