"""Words in variables that OpenTelemetry's own SDK reads too: what is legal there and not ours is left out."""

from collections.abc import Callable
from typing import TypeAlias

Ours: TypeAlias = Callable[[str], str]
"""Gives what is left of a variable's text for torchotel; empty: nothing."""


def all_of(text: str) -> str:
    """Leave nothing out."""
    return text


def without(*others: str) -> Ours:
    """Leave out some words of a list, or the only one."""
    return lambda text: ",".join(word for word in text.split(",") if word.strip().lower() not in others)


def only(*words: str) -> Ours:
    """Keep the known words of a list, and "none"."""
    return lambda text: ",".join(word for word in text.split(",") if word.strip().lower() in {*words, "none"})


def first(*words: str) -> Ours:
    """Keep the first known word of a list, by the order of `words`."""

    def ours(text: str) -> str:
        left = only(*words)(text)
        found = {word.strip().lower() for word in left.split(",")}
        return left if "none" in found else next((word for word in words if word in found), "")

    return ours
