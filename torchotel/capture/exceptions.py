"""Turns exceptions into records: class, module, and as much of the text as the setting allows."""

from collections.abc import Callable
from itertools import dropwhile
from typing import Literal, TypeAlias

from torch.nn import Module

from torchotel._limits import MAX_EXCEPTION_TEXT
from torchotel._records import Error
from torchotel._utils.text import shortened
from torchotel.capture.torch_internals import modules_that_raised

ExceptionText: TypeAlias = Literal["type", "first_line", "full"]

_TRACEBACK = "Traceback (most recent call last):"
_WORKER_TRACEBACK = f"\nOriginal {_TRACEBACK}"
"""Begins the traceback of another process, with source lines and paths, that `ExceptionWrapper` adds."""


class ErrorReader:
    """Turn exceptions into records.

    The text of an exception can hold values of tensors, mostly in further lines, so only the first is kept by default.

    Args:
        text: How much of the text is kept: nothing, the first line, or all. Of a DataLoader worker's traceback, only
            the exception is kept, to the same extent.
        path_of: Returns the path of a module, None for an unknown one.
    """

    def __init__(
        self, text: ExceptionText = "first_line", path_of: Callable[[Module], str | None] = lambda _: None
    ) -> None:
        self._text, self._path_of = text, path_of

    def read(self, exception: BaseException | None, module: Module | None = None) -> Error | None:
        """Describe an exception; None for no exception, and for the one that ends a recomputation early.

        Args:
            exception: The exception.
            module: The module whose call raised.
        """
        if exception is None:
            return None
        kind = type(exception)
        if kind.__name__ == "_StopRecomputationError":
            return None
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        try:
            message = self._kept(exception)
        except Exception:  # noqa: BLE001  # `__str__` of the program may raise anything
            message = ""
        return Error(shortened(name), message, self._path(exception, module))

    def _path(self, exception: BaseException, module: Module | None) -> str | None:
        """Return the path of the innermost known module whose call raised."""
        inside = modules_that_raised(exception.__traceback__)
        for one in reversed(inside if module is None else [module, *inside]):
            path = self._path_of(one)
            if path is not None:
                return shortened(path)
        return None

    def _kept(self, exception: BaseException) -> str:
        if self._text == "type":
            return ""
        message, _, original = str(exception).partition(_WORKER_TRACEBACK)
        raised = _raised(original)
        if self._text == "first_line":
            message, raised = message.partition("\n")[0], raised[:1]
        return " ".join([message, "\n".join(raised)]).strip()[:MAX_EXCEPTION_TEXT]


def _raised(original: str) -> list[str]:
    """Return the class and the text of a worker's exception, which follow the frames of its last traceback."""
    frames = original.rpartition(_TRACEBACK)[2].rstrip().splitlines()
    return list(dropwhile(lambda line: line[:1] in {" ", ""}, frames))
