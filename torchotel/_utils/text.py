"""How numbers and names read in a terminal."""

from collections.abc import Sequence

from torchotel._limits import MAX_NAME

RED, GREEN, YELLOW = "31", "32", "33"
"""Codes of ANSI's Select Graphic Rendition."""
_MINUTE_S = 60.0


class Output:
    """Format text for a file or a pipe: nothing is cut, wrapped or coloured."""

    width: int | None = None
    """In columns; None: unlimited."""

    def colour(self, text: str, code: str) -> str:
        """Colour a text."""
        return text

    def wrap(self, text: str, indent: str = "") -> Sequence[str]:
        """Wrap a line; further lines begin with `indent`."""
        return [text]


def duration(seconds: float) -> str:
    """Write a time with the unit that suits it."""
    if seconds >= _MINUTE_S:
        return f"{seconds:,.0f} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:#.4g}".rstrip(".") + f" {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0"


def rate(a_second: float) -> str:
    """Write how many a second, without an exponent for large numbers."""
    return f"{a_second:,.0f}" if a_second >= 1000 else f"{a_second:.4g}"  # noqa: PLR2004 # four digits in either case


def printable(text: str) -> str:
    """Put a question mark for what a terminal would obey: names may be a stranger's."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def shortened(text: str, limit: int = MAX_NAME) -> str:
    """Bring a text to a bounded length; its middle goes, since both ends tell most."""
    if len(text) <= limit:
        return text
    head = (limit - 1) // 2
    return f"{text[:head]}…{text[head + 1 - limit :]}"


def cut(text: object, limit: int = 60) -> str:
    """Write a stranger's text as one printable line of bounded length."""
    # What is not printable could break lines, turn the direction of writing, or be half a character.
    return printable(shortened(str(text), limit))
