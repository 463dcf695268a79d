"""The result of a check."""

from enum import Enum
from typing import NamedTuple


class Level(Enum):
    """How severe a finding is."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "FAILED"


class Finding(NamedTuple):
    """One line of the doctor's report, with advice."""

    subject: str
    level: Level
    text: str
    advice: str = ""
    """Instructions, in one line or several."""


def ok(subject: str, text: str, advice: str = "") -> Finding:
    """Return a finding that needs no action."""
    return Finding(subject, Level.OK, text, advice)


def warning(subject: str, text: str, advice: str) -> Finding:
    """Return a finding on a setting that works, but may not be intended."""
    return Finding(subject, Level.WARNING, text, advice)


def failed(subject: str, text: str, advice: str) -> Finding:
    """Return a finding on a failure."""
    return Finding(subject, Level.FAILED, text, advice)


class CheckFailed(Exception):  # noqa: N818 - becomes a finding, and is not an error of the doctor
    """A check failed; text and advice become a finding."""

    def __init__(self, text: str, advice: str) -> None:
        super().__init__(text)
        self.text, self.advice = text, advice
