"""A file that tells Prometheus where this process is scraped (file_sd)."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

from torchotel.exporters.spans import speakable_text
from torchotel.tracing.span import Attributes

WILDCARDS = {"0.0.0.0", "::", ""}  # noqa: S104  # compared with, not bound to
MAX_TARGET_BYTES = 64 * 1024
"""A larger file in the folder is not one that torchotel wrote, and is not read."""


class DiscoveryFile:
    """One target in a folder that Prometheus watches: `file_sd_configs: [{files: ["FOLDER/*.json"]}]`.

    That of a process which died is left there, so that Prometheus sees it down, until another one takes its port.

    Args:
        folder: Made where it is not there.
        job: What the series are labelled with, in place of the name of Prometheus's scrape job.

    Raises:
        OSError: The folder can't be made or written to.
    """

    def __init__(self, folder: Path, job: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied", os.fspath(folder))
        self._job = job
        # Several hosts may share the folder.
        self._host = f"torchotel-{socket.gethostname()}-"
        # Absolute, since the program may change its working directory.
        self.path = folder.absolute() / f"{self._host}{os.getpid()}.json"

    def write(self, host: str, port: int) -> None:
        """Name the target; Prometheus sees the whole file or none."""
        name = socket.gethostname() if host in WILDCARDS else host
        address = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
        new = self.path.with_name(f".{self.path.name}.new")
        # Other labels would collide with those of target_info.
        new.unlink(missing_ok=True)
        # Others may write to the folder as well: a link of theirs is not followed. Prometheus, which is another user,
        # has to read the file whatever the umask says; there is no more in it than an address and a name.
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(json.dumps([{"targets": [address], "labels": {"job": self._job}}]) + "\n")
        new.replace(self.path)
        self._remove_dead(address)

    def remove(self) -> None:
        """Take the target back."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _remove_dead(self, address: str) -> None:
        """Remove target files that dead processes of this user and host left for the address of this process."""
        for other in self.path.parent.glob(f"{glob.escape(self._host)}*.json"):
            # Anyone may write to a shared folder, so any content is possible, such as JSON nested too deeply.
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
                if other != self.path and _read_own(other)[0]["targets"] == [address]:
                    other.unlink()


def _read_own(path: Path) -> Any:
    """Parse a target file of this user.

    Raises:
        OSError: The path is a link, cannot be opened, or is not a small regular file of this user.
        ValueError: The content is not JSON.
        RecursionError: The JSON is nested too deeply.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe would block
    with os.fdopen(os.open(path, flags), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size > MAX_TARGET_BYTES:
            raise PermissionError(path)
        return json.loads(file.read(MAX_TARGET_BYTES))


def job_of(resource: Attributes) -> str:
    """Name the job as Prometheus names that of metrics which are pushed to it: the service, after its namespace."""
    names = (resource.get(f"service.{name}") for name in ("namespace", "name"))
    return speakable_text("/".join(str(name) for name in names if name))
