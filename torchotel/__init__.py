"""OpenTelemetry for PyTorch training: every module call a span, forward and backward.

Importing this does nothing; `instrument()` does everything.
"""

from torchotel._annotate import log, name, step, watch
from torchotel._errors import ConfigError
from torchotel._instrument import instrument, uninstrument

__all__ = ["ConfigError", "instrument", "log", "name", "step", "uninstrument", "watch"]
