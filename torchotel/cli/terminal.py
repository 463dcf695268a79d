"""The width, colours and signs of the terminal that a command writes to."""

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

from torchotel._text import Output


class Terminal(Output):
    """Format text for a stream: fitted, wrapped and coloured on a terminal, plain in a file or a pipe.

    COLUMNS sets the width of a terminal. NO_COLOR (https://no-color.org) switches colours off, FORCE_COLOR
    (https://force-color.org) on, else TERM=dumb off.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout
        is_terminal = stream.isatty()
        self.width = shutil.get_terminal_size().columns if is_terminal else None
        self.has_unicode = is_terminal and (stream.encoding or "").lower().startswith("utf")
        self._has_colours = not os.environ.get("NO_COLOR") and bool(
            os.environ.get("FORCE_COLOR") or (is_terminal and os.environ.get("TERM") != "dumb")
        )

    def colour(self, text: str, code: str) -> str:
        """Colour a text if colours are on."""
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
