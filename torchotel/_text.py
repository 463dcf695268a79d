"""How numbers and names read in a terminal."""

_MINUTE_S = 60.0


def duration(seconds: float) -> str:
    """Write a time with the unit that suits it."""
    if seconds >= _MINUTE_S:
        return f"{seconds:,.0f} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:#.4g}".rstrip(".") + f" {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0"


def printable(text: str) -> str:
    """Put a question mark for what a terminal would obey: names may be a stranger's."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)
