"""A page in a real browser without a network: what is there once it is drawn, and what its console says."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

BINARY = shutil.which("chromium")
SKIPPED = "there is no chromium on the path"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--proxy-server=http://127.0.0.1:9",  # nothing listens there: what asks for anything fails, and says so
    "--enable-logging=stderr",
    "--virtual-time-budget=60000",
    "--dump-dom",
)
_TIMEOUT_S = 300


class Opened(NamedTuple):
    """A page after its scripts have run."""

    dom: str
    console: list[str]

    def section(self, name: str) -> str:
        """Cut one section out, up to the next one's beginning."""
        return self.dom.partition(f'<section id="{name}">')[2].partition("<section ")[0]


def open_page(page: Path, profile: Path, *flags: str) -> Opened:
    """Open a page of this machine's; `profile` is a folder for the browser's own files."""
    done = subprocess.run(
        [BINARY or "chromium", *FLAGS, *flags, f"--user-data-dir={profile}", page.absolute().as_uri()],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=True,
    )
    # The browser's own pages complain too, of a network that is not there.
    return Opened(done.stdout, re.findall(r"CONSOLE.*, source: (?!chrome:).*", done.stderr))
