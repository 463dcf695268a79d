"""OpenTelemetry for PyTorch training: every module call a span, forward and backward.

Importing this does nothing; `instrument()` does everything.
"""

from torchotel._api import instrument, log, name, step, uninstrument, watch
from torchotel._types import ConfigError

__all__ = ["ConfigError", "instrument", "log", "name", "step", "uninstrument", "watch"]
