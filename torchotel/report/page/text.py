"""Words and numbers for the page; whatever comes out of a run file goes through here."""

import html
import math

from torchotel._text import cut, duration, rate

_LONGEST = 60
_SECOND_S = 1.0


def shown(text: object, limit: int = _LONGEST) -> str:
    """Cut a stranger's text and escape it, for HTML and for plotly, which reads tags and TeX in its labels."""
    return html.escape(cut(text, limit), quote=False).replace("$", "&#36;")


def scale(seconds: float) -> tuple[str, float]:
    """Choose the unit of an axis by a typical value: its name, and how many of it a second holds."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= _SECOND_S:
            return unit, factor
    return "ms", 1e3


def percent(share: float) -> str:
    """Write a share with as many digits as it deserves."""
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"  # noqa: PLR2004 # two digits in either case


def count(number: float, noun: str) -> str:
    """Write a count with its noun, in the plural where it needs one."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def size(number: float) -> str:
    """Write a large count as people say it."""
    for unit, scale_ in (("billion", 1e9), ("million", 1e6)):
        if number >= scale_:
            return f"{number / scale_:.3g} {unit}"
    return f"{number:,}"


def rounded(value: float) -> float | None:
    """Keep four digits, which is more than a screen shows and half the size; JSON has no other than finite numbers."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


__all__ = ["count", "cut", "duration", "percent", "rate", "rounded", "scale", "shown", "size"]
