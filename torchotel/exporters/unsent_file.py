"""The steps without a record, in a file of the run folder, as a companion process sees them.

The companion may end together with the training process, before it can export these steps.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import threading
from collections.abc import Iterable
from pathlib import Path

from torchotel._records import StepRecord
from torchotel.exporters.run_file import record_line, to_json

UNSENT_NAME = "unsent.jsonl"


class UnsentFile:
    """The file of the steps that have no record yet; while its writer lives, the file is locked.

    Writing is slow if the disk is, so it has a thread of its own, which skips lines while it writes earlier ones.

    Args:
        folder: The run folder.

    Raises:
        OSError: The file cannot be created or locked.
    """

    def __init__(self, folder: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(folder / UNSENT_NAME, flags, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise
        self._written = b""
        self._next: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._is_idle = True
        threading.Thread(target=self._run, name="torchotel-unsent", daemon=True).start()

    def write(self, records: Iterable[StepRecord]) -> None:
        """Replace the lines, unless nothing has changed, or earlier lines are still being written."""
        content = b"".join(to_json(record_line(record, 0, ())) + b"\n" for record in records)
        if self._is_idle and content != self._written:
            self._is_idle, self._written = False, content
            self._next.put(content)

    def _run(self) -> None:
        while True:
            content = self._next.get()
            with contextlib.suppress(OSError):  # the run file warns of a full disk
                os.ftruncate(self._fd, 0)  # first: a part of the old lines after the new ones could not be read
                os.pwrite(self._fd, content, 0)
            self._is_idle = True


def remove_unsent(folder: Path) -> None:
    """Remove the file of the steps without a record: all steps have one."""
    with contextlib.suppress(OSError):
        (folder / UNSENT_NAME).unlink(missing_ok=True)
