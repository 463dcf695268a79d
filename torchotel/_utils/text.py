"""Format numbers and names for a terminal."""

from collections.abc import Sequence

from torchotel._limits import MAX_NAME

RED, GREEN, YELLOW = "31", "32", "33"
"""Codes of ANSI's Select Graphic Rendition."""
_MINUTE_S = 60.0


class Output:
    """Write text to a file or a pipe, without cutting, wrapping or colours."""

    width: int | None = None
    """Columns; None: unlimited."""

    def colour(self, text: str, code: str) -> str:
        """Return a coloured text."""
        return text

    def wrap(self, text: str, indent: str = "") -> Sequence[str]:
        """Wrap a line; `indent` starts the following lines."""
        return [text]


def duration(seconds: float) -> str:
    """Format a time with a fitting unit."""
    if seconds >= _MINUTE_S:
        return f"{seconds:,.0f} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:#.4g}".rstrip(".") + f" {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0"


def rate(a_second: float) -> str:
    """Format a number per second, without an exponent."""
    return f"{a_second:,.0f}" if a_second >= 1000 else f"{a_second:.4g}"  # noqa: PLR2004  # four digits in both cases


def printable(text: str) -> str:
    """Replace control characters by question marks: names may come from untrusted files."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def shortened(text: str, limit: int = MAX_NAME) -> str:
    """Shorten a text to `limit` characters by removing its middle."""
    if len(text) <= limit:
        return text
    head = (limit - 1) // 2
    return f"{text[:head]}…{text[head + 1 - limit :]}"


def cut(text: object, limit: int = 60) -> str:
    """Format an untrusted text as one printable line of at most `limit` characters."""
    # Other characters could break lines, change the direction of text, or be lone surrogates.
    return printable(shortened(str(text), limit))
