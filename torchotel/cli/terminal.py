"""The width, colours and signs of the terminal that a command writes to."""

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

BOLD, RED, GREEN, YELLOW = "1", "31", "32", "33"
"""Codes of ANSI's Select Graphic Rendition."""


class Terminal:
    """Format text for a stream: wrapped and coloured on a terminal, plain and unwrapped in a file or a pipe.

    COLUMNS sets the width anywhere. NO_COLOR (https://no-color.org) and TERM=dumb switch colours off.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout
        is_terminal = stream.isatty()
        self.width: int | None = None
        """In columns; None: unlimited."""
        if is_terminal or os.environ.get("COLUMNS"):
            self.width = shutil.get_terminal_size().columns
        self.has_unicode = is_terminal and (stream.encoding or "").lower().startswith("utf")
        self._has_colours = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def colour(self, text: str, code: str) -> str:
        """Colour a text on a terminal."""
        return f"\x1b[{code}m{text}\x1b[0m" if self._has_colours and text else text

    def wrap(self, text: str, indent: str = "") -> Sequence[str]:
        """Wrap a line to the width; further lines begin with `indent`.

        Words are never broken, so that URLs and commands can be copied.
        """
        if self.width is None:
            return [text]
        return textwrap.wrap(
            text, self.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [text]
