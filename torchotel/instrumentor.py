"""The entry point of `opentelemetry-instrument python train.py`.

No other module imports this one: it needs opentelemetry-instrumentation, the package of that command.
"""

import logging
import os
import sys
from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]  # untyped as a whole

from torchotel._api import uninstrument
from torchotel._auto_instrument import start_with_torch
from torchotel._types import ConfigError
from torchotel._utils.process import is_fork_server
from torchotel.config.config import SETTINGS, Config

_logger = logging.getLogger("torchotel")


class TorchInstrumentor(BaseInstrumentor):  # type: ignore[misc]  # its base is untyped
    """Do what `torchotel.instrument()` does, once the program has imported torch.

    `instrument` takes the same settings. A bad setting is reported on standard error, nothing is instrumented, and
    the program runs: its author may not have set the variables. An unknown argument is ignored with a warning, since
    it may be meant for other instrumentors.
    """

    def instrumentation_dependencies(self) -> Collection[str]:
        """Return the supported versions of torch."""
        return ("torch >= 2.9.0a0",)  # a0: NVIDIA's containers have pre-releases

    def _instrument(self, **kwargs: Any) -> None:
        explicit = {name: value for name, value in kwargs.items() if name in SETTINGS}
        if unknown := [name for name in kwargs if name not in SETTINGS]:
            _logger.warning("torchotel has no setting %s: ignored", " and ".join(unknown))
        try:
            config = Config.read(explicit, os.environ)
        except ConfigError as error:
            _report(error)
            return
        if not config.disabled and not is_fork_server():  # which only forks
            start_with_torch(explicit, defer_start=True, failed=_report)

    def _uninstrument(self, **kwargs: Any) -> None:
        uninstrument()


def _report(error: ConfigError) -> None:
    # Not logged: opentelemetry-instrumentation-logging adds a handler to the root logger that exports the records, and
    # with a handler there, `logging.lastResort` no longer prints them.
    print(f"torchotel: {error}. Nothing is instrumented.", file=sys.stderr)  # noqa: T201  # a log record may not be printed
