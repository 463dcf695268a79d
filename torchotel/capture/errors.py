"""What a record holds of an exception: its class, and as much of its text as the setting allows."""

from typing import Literal, TypeAlias

from torchotel._records import Error
from torchotel._text import shortened

ExceptionText: TypeAlias = Literal["type", "first_line", "full"]

MAX_MESSAGE = 4096
_WORKER_TRACEBACK = "\nOriginal Traceback (most recent call last):"
"""Begins what `torch._utils.ExceptionWrapper` adds of another process: its source lines and paths."""


class ErrorReader:
    """Turn exceptions into records.

    The text of an exception can hold values of tensors, mostly in further lines, so only the first is kept by default.

    Args:
        text: How much of the text is kept: nothing, the first line, or all but the traceback of a DataLoader's worker.
    """

    def __init__(self, text: ExceptionText = "first_line") -> None:
        self._text = text

    def read(self, exception: BaseException | None) -> Error | None:
        """Describe an exception; None for none, and for the one by which checkpointing ends a recomputation early."""
        if exception is None:
            return None
        kind = type(exception)
        if kind.__name__ == "_StopRecomputationError":
            return None
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        try:
            message = self._kept(exception)
        except Exception:  # noqa: BLE001  # the user's own __str__ may raise anything
            message = ""
        return Error(shortened(name), message)

    def _kept(self, exception: BaseException) -> str:
        if self._text == "type":
            return ""
        message = str(exception).partition(_WORKER_TRACEBACK)[0]
        if self._text == "first_line":
            message = next(iter(message.splitlines()), "")
        return message[:MAX_MESSAGE]
