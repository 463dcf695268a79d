"""What ends a check early, and words of others that can be shown."""

from collections.abc import Mapping

from torchotel._text import printable

MOST_SHOWN = 200
"""Characters that are shown of what another program says."""


class Trouble(Exception):  # noqa: N818 - it is a finding on its way, and no error of the doctor's
    """Say what does not work, and what to do about it."""

    def __init__(self, text: str, advice: str) -> None:
        super().__init__(text)
        self.text, self.advice = text, advice


def foreign(text: object, headers: Mapping[str, str]) -> str:
    """Give what a server or a library says in one line of printable characters, without the values of our headers."""
    shown = str(text)
    for value in headers.values():
        for secret in (value, value.rpartition(" ")[2]):  # "Bearer …" is often told without its first word
            shown = shown.replace(secret, "...") if secret else shown
    line = printable(" ".join(shown.split()))
    return line if len(line) <= MOST_SHOWN else line[: MOST_SHOWN - 3] + "..."
