"""What ends a check early."""


class Trouble(Exception):  # noqa: N818 - it is a finding on its way, and no error of the doctor's
    """Say what does not work, and what to do about it."""

    def __init__(self, text: str, advice: str) -> None:
        super().__init__(text)
        self.text, self.advice = text, advice
