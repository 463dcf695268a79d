"""Warnings that a user gets once."""

import functools
import logging
from contextlib import suppress

_logger = logging.getLogger("torchotel")


@functools.cache
def warn_once(text: str, *values: object) -> None:
    """Log what is wrong with a setting, unless it has been: variables are read again by each `instrument()`."""
    _logger.warning(text, *values)


class Warn:
    """Log what a run can't do or see: each text once, with the values that it comes up with first."""

    def __init__(self) -> None:
        self._told: dict[str, object] = {}

    def __call__(self, text: str, *values: object) -> None:
        """Log a warning, unless this text has been; from any thread, and without raising."""
        this_call = object()
        if self._told.setdefault(text, this_call) is this_call:
            with suppress(Exception):  # a handler of the user's may raise
                _logger.warning(text, *values)
