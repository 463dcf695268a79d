"""The one line: `torchotel.instrument()`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torchotel._config import UNSET, Config, Unset

if TYPE_CHECKING:
    from torch.nn import Module

    from torchotel._handle import Handle


def instrument(
    model: Module | None = None,
    *,
    service_name: str | Unset | None = UNSET,
    endpoint: str | Unset = UNSET,
    protocol: Literal["http/protobuf"] | Unset = UNSET,
    headers: Mapping[str, str] | Unset = UNSET,
    compression: Literal["gzip", "none"] | Unset = UNSET,
    traces_exporter: Literal["otlp", "none"] | Unset = UNSET,
    record: str | Path | Unset | None = UNSET,
    detail: Literal["auto", "all", "off"] | int | Unset = UNSET,
    include: str | Sequence[str] | Unset | None = UNSET,
    exclude: str | Sequence[str] | Unset | None = UNSET,
    max_depth: int | Unset | None = UNSET,
    max_spans: int | Unset | None = UNSET,
    shapes: bool | Unset = UNSET,
    run_id: str | Unset | None = UNSET,
) -> Handle:
    """Trace every training step of this process, from its next event on.

    An argument that is left out is read from its variable, and only then takes its default. A second call returns
    the same handle and warns where its arguments differ.

    Args:
        model: Its modules get their full names from the first call on.
        service_name: OTEL_SERVICE_NAME; the script's name.
        endpoint: OTEL_EXPORTER_OTLP_ENDPOINT, a base URL; `http://localhost:4318`.
        protocol: OTEL_EXPORTER_OTLP_PROTOCOL; `http/protobuf`.
        headers: OTEL_EXPORTER_OTLP_HEADERS; none.
        compression: OTEL_EXPORTER_OTLP_COMPRESSION; `gzip`.
        traces_exporter: OTEL_TRACES_EXPORTER, "otlp" or "none"; `otlp`.
        record: TORCHOTEL_RECORD, folder of the run file; None: no run file.
        detail: TORCHOTEL_DETAIL; "auto": the first ten steps, then every 64th, "all", n: every n-th, "off": steps
            and phases only.
        include: TORCHOTEL_INCLUDE, patterns of the module paths that get spans (`*` crosses dots); all.
        exclude: TORCHOTEL_EXCLUDE, patterns of those that get none; none.
        max_depth: TORCHOTEL_MAX_DEPTH, deepest level of modules that get spans, the root is 0; no limit.
        max_spans: TORCHOTEL_MAX_SPANS, of one trace, deeper modules fold into their parents; 2000.
        shapes: TORCHOTEL_SHAPES, whether shapes and dtypes are recorded; True.
        run_id: TORCHOTEL_RUN_ID; the launcher's job id, else random.

    Raises:
        ConfigError: A value is bad; nothing was installed.
    """
    given = {name: value for name, value in locals().items() if name != "model" and value is not UNSET}
    Config.read(given, os.environ)  # a bad value is told before torch is loaded
    from torchotel import _handle  # noqa: PLC0415  # brings in torch: importing torchotel must stay free

    return _handle.start(given, model)


def uninstrument() -> None:
    """Shut down what `instrument()` started, if it runs."""
    handle = sys.modules.get("torchotel._handle")
    if handle is not None:
        handle.stop()
