"""The result of a check."""

from enum import Enum
from typing import NamedTuple


class Level(Enum):
    """How a finding is to be taken."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "FAILED"


class Finding(NamedTuple):
    """One line of the doctor's report, and the advice that stands below it."""

    subject: str
    level: Level
    text: str
    advice: str = ""
    """What to do, in one line or several."""


def ok(subject: str, text: str, advice: str = "") -> Finding:
    """Say what is as it should be."""
    return Finding(subject, Level.OK, text, advice)


def warning(subject: str, text: str, advice: str) -> Finding:
    """Say what works, though perhaps not as it was meant."""
    return Finding(subject, Level.WARNING, text, advice)


def failed(subject: str, text: str, advice: str) -> Finding:
    """Say what does not work."""
    return Finding(subject, Level.FAILED, text, advice)


class CheckFailed(Exception):  # noqa: N818 - it is a finding on its way, and no error of the doctor's
    """Say what does not work, and what to do about it."""

    def __init__(self, text: str, advice: str) -> None:
        super().__init__(text)
        self.text, self.advice = text, advice
