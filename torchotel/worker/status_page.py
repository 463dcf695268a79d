"""The status page: counts of capture, and what the main thread does, in the memory that both processes share.

The training process only writes. The companion may read a count or a phase that is being written: a count is one word,
and a phase that cannot be right is left out. So no barrier is needed between them.
"""

from __future__ import annotations

import math
import signal
import struct
from array import array
from typing import Final, NamedTuple

from torchotel._records import Alignment
from torchotel.worker.stats import CaptureStats

MAX_PHASES: Final = 64
"""Phases that the page has room for; each further one replaces the oldest."""
MAX_READABLE: Final = MAX_PHASES - 1
"""Phases that are read: the process may have been killed while it replaced the oldest one."""
_WORDS: Final = 5
"""Words of 8 bytes for one phase: kind, start, end, and the alignment of its step; the first of its numbers plus 1."""
_THREAD, _BEGUN, _FIRST, _COUNTS, _RATIO, _SIGNAL, _PHASES = 0, 1, 2, 3, 6, 7, 8
"""Where the thread's id, the counter of phases, the number of the first phase of this companion, the counts of capture,
the bits of a share of time, the signal for stacks, and the phases are."""
_FLOAT, _BITS = struct.Struct("=d"), struct.Struct("=Q")
_MODULE: Final = _PHASES + MAX_PHASES * _WORDS
"""Where the path of the innermost module call is, the rest of its bytes zero."""
_PATH_WORDS: Final = 32
MAX_PATHS: Final = 1 << 14
"""Paths that are kept as the page has them; a program may make modules with ever new names."""
PAGE_BYTES: Final = 8 * (_MODULE + _PATH_WORDS)

_KINDS: Final = ("data", "forward", "backward", "optimizer")
_CODES: Final = {kind: code for code, kind in enumerate(_KINDS, start=1)}
_WITHOUT_GRAD: Final = 8
"""Added to the code of a forward that runs without gradients."""


def write_counts(page: memoryview, counts: CaptureStats, overhead_ratio: float | None) -> None:
    """Write the counts of capture, and the share of step time that detail costs, to the page.

    Raises:
        ValueError: The page is released.
    """
    for place, number in enumerate(counts, start=_COUNTS):
        page[place] = number
    (page[_RATIO],) = _BITS.unpack(_FLOAT.pack(math.nan if overhead_ratio is None else overhead_ratio))


def write_stack_signal(page: memoryview, number: int) -> None:
    """Write the signal at which the training process writes its stack; 0: it has none.

    Raises:
        ValueError: The page is released.
    """
    page[_SIGNAL] = number


def new_page() -> memoryview[int]:
    """Return an empty page in the memory of this process alone."""
    return memoryview(bytearray(PAGE_BYTES)).cast("Q")


class PagePhase(NamedTuple):
    """A phase on the page."""

    kind: str
    start_ns: int
    end_ns: int
    """0 while the phase is open."""
    grad: bool
    """Whether gradients were on."""
    alignment: Alignment | None = None
    """The alignment of its step; None if there are no other ranks, or if it was not known."""


class PhaseWriter:
    """Write the phases and the module calls of one thread to the page; each takes less than 0.5 µs, and nothing raises.

    Args:
        page: The page, as unsigned words of 8 bytes. It may be released at any time.
        thread: The id of the thread.
    """

    __slots__ = ("_begun", "_open", "_page", "_path", "_paths")

    def __init__(self, page: memoryview, thread: int) -> None:
        self._page = page
        self._begun = 0
        self._open: list[tuple[str, int]] = []
        """The kinds and numbers of the phases that are open, the outermost first."""
        self._path, self._paths = "", {"": _path_words("")}
        page[_THREAD] = thread

    def move_to(self, page: memoryview) -> None:
        """Write to another page from now on, which gets what this one has."""
        page[:] = self._page
        self._page = page

    def begin(self, kind: str, now_ns: int, *, grad: bool = True, alignment: Alignment | None = None) -> None:
        """Begin a phase, inside of the open ones.

        Args:
            kind: data | forward | backward | optimizer.
            now_ns: The time of `perf_counter_ns`, which both processes share.
            grad: Whether gradients are on.
            alignment: The alignment of its step.
        """
        page, number = self._page, self._begun
        collectives, steps = (0, 0) if alignment is None else (alignment[0] + 1, alignment[1])
        at = _PHASES + number % MAX_PHASES * _WORDS
        try:
            page[at] = _CODES[kind] if grad else _CODES[kind] | _WITHOUT_GRAD
            page[at + 1] = now_ns
            page[at + 2] = 0
            page[at + 3], page[at + 4] = collectives, steps
            page[_BEGUN] = self._begun = number + 1  # last: the process may be killed between two stores
        except ValueError:  # released: torchotel is shut down
            return
        self._open.append((kind, number))

    def end(self, kind: str, now_ns: int) -> None:
        """End the innermost open phase of a kind, and the phases inside of it; do nothing if none is open."""
        if self._path:
            self.note_module("")
        while any(kind == one for one, _ in self._open):
            ended, number = self._open.pop()
            if self._begun - number <= MAX_PHASES:  # else a later phase has its place
                try:
                    self._page[_PHASES + number % MAX_PHASES * _WORDS + 2] = now_ns
                except ValueError:  # released: torchotel is shut down
                    return
            if ended == kind:
                return

    def note_module(self, path: str) -> None:
        """Write the path of the innermost module call that runs; "" if it is unknown, or none runs."""
        words = self._paths.get(path)
        if words is None:
            if len(self._paths) >= MAX_PATHS:
                self._paths.clear()
            words = self._paths[path] = _path_words(path)
        self._path = path
        try:
            self._page[_MODULE:] = words
        except ValueError:  # released: torchotel is shut down
            return


def _path_words(path: str) -> array[int]:
    size = 8 * _PATH_WORDS
    return array("Q", path.encode(errors="replace")[:size].ljust(size, b"\0"))


def hide_phases(page: memoryview) -> None:
    """Keep the phases so far from later readers: another companion does not know which of them were exported."""
    page[_FIRST] = page[_BEGUN]


class PageReader:
    """Read the page in the companion process. Nothing on the page is trusted.

    Args:
        page: The page, as unsigned words of 8 bytes.
    """

    def __init__(self, page: memoryview) -> None:
        self._page = page

    @property
    def thread(self) -> int:
        """The id of the thread whose phases are on the page."""
        return self._page[_THREAD]

    @property
    def is_partial(self) -> bool:
        """Whether phases were hidden, because an earlier companion received their records."""
        return self._page[_FIRST] > 0

    @property
    def counts(self) -> CaptureStats:
        """The counts of capture, at most a second old."""
        return CaptureStats(*self._page[_COUNTS:_RATIO])

    @property
    def overhead_ratio(self) -> float | None:
        """The share of step time that detail costs; None if it is unknown."""
        (ratio,) = _FLOAT.unpack(_BITS.pack(self._page[_RATIO]))
        return ratio if math.isfinite(ratio) else None

    @property
    def stack_signal(self) -> int:
        """The signal at which the training process writes its stack; 0: it has none."""
        number = self._page[_SIGNAL]
        return number if signal.SIGRTMIN <= number <= signal.SIGRTMAX else 0

    @property
    def module(self) -> str:
        """The path of the innermost module call that runs; "" if it is unknown, or none runs."""
        return bytes(self._page[_MODULE:]).partition(b"\0")[0].decode(errors="ignore")

    def content(self) -> bytes:
        """Return the phases and the module as they are now, to compare them with later ones."""
        return bytes(self._page[_PHASES:])

    def phases(self, now_ns: int) -> list[PagePhase]:
        """Return the phases in order of their starts; those that cannot be right are left out.

        Args:
            now_ns: The present time, which no phase is later than.
        """
        begun = self._page[_BEGUN]
        oldest = max(self._page[_FIRST], begun - MAX_READABLE)
        found: list[PagePhase] = []
        for number in range(oldest, begun) if oldest < begun else ():
            at = _PHASES + number % MAX_PHASES * _WORDS
            code, start_ns, end_ns, collectives, steps = self._page[at : at + _WORDS]
            kind = code & ~_WITHOUT_GRAD
            earliest_ns = found[-1].start_ns if found else 1
            if (
                1 <= kind <= len(_KINDS)
                and earliest_ns <= start_ns <= now_ns
                and (not end_ns or start_ns <= end_ns <= now_ns)
            ):
                alignment = (collectives - 1, steps) if collectives else None
                found.append(PagePhase(_KINDS[kind - 1], start_ns, end_ns, not code & _WITHOUT_GRAD, alignment))
        return found
