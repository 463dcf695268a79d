"""A file of whole lines."""

import contextlib
import errno
import os
from pathlib import Path


class LineFile:
    """Append lines to a new file that only its owner can read.

    Each line is written at once, so that after a crash all but the last are whole.

    Raises:
        FileExistsError: If the file is there already.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        """Bytes."""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def append(self, line: bytes) -> None:
        """Write a line and its break; nothing of the line stays if writing fails.

        Raises:
            FileNotFoundError: The file has been removed, so lines in it are lost.
            OSError: The disk failed or is full.
        """
        if not os.fstat(self._fd).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "the file was removed", os.fspath(self.path))
        rest = memoryview(line + b"\n")
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.size)
                os.lseek(self._fd, self.size, os.SEEK_SET)
            raise
        self.size += len(line) + 1

    def close(self) -> None:
        """Close; again is no harm."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
