"""The entry point of `opentelemetry-instrument python train.py`.

Nothing else imports this: it needs opentelemetry-instrumentation, which whoever runs that command has.
"""

import logging
import os
import sys
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]  # untyped as a whole

from torchotel._api import uninstrument
from torchotel._auto_instrument import start_with_torch
from torchotel._types import ConfigError
from torchotel._utils.process import is_fork_server
from torchotel.config.config import Config

_logger = logging.getLogger("torchotel")


class TorchInstrumentor(BaseInstrumentor):  # type: ignore[misc]  # its base is untyped
    """Do what `torchotel.instrument()` does, once the program has imported torch.

    `instrument` takes the same settings. A bad one is said and nothing is instrumented: who wrote the program
    need not be who set the variables. What is no setting is warned of: it may be meant for other instrumentors.
    """

    def instrumentation_dependencies(self) -> Collection[str]:
        """Name what is instrumented."""
        return ("torch >= 2.9.0a0",)  # the "a0": NVIDIA builds its containers from what becomes a release

    def _instrument(self, **kwargs: Any) -> None:
        known = {field.name for field in fields(Config)}
        given = {name: value for name, value in kwargs.items() if name in known}
        if foreign := [name for name in kwargs if name not in known]:
            _logger.warning("torchotel takes no %s, and goes on without", " and ".join(foreign))
        try:
            config = Config.read(given, os.environ)
        except ConfigError as error:
            _say(error)
            return
        if not config.disabled and not is_fork_server():  # its children are forked, and those are left alone
            start_with_torch(given, wait=True, failed=_say)

    def _uninstrument(self, **kwargs: Any) -> None:
        uninstrument()


def _say(error: ConfigError) -> None:
    # Not logged: the instrumentation of logging puts a handler on the root logger that sends records elsewhere, and
    # Python's own handler of last resort is silent from then on.
    print(f"torchotel: {error}. Nothing is instrumented.", file=sys.stderr)  # noqa: T201  # see above
