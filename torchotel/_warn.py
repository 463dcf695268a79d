"""What is wrong with a setting and can be gone on without."""

import functools
import logging

_logger = logging.getLogger("torchotel")


@functools.cache
def warn_once(text: str, *values: object) -> None:
    """Log a warning, unless it has been: variables are read again by each `instrument()`."""
    _logger.warning(text, *values)
