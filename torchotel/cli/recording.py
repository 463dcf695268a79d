"""Run a program with a recording, then say what it did and where to look."""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchotel._config import Config, own_folder
from torchotel.cli.program import Program
from torchotel.report import open_run, render, summarise

if TYPE_CHECKING:
    from torchotel._handle import Handle

RUNS = Path("torchotel-runs")
"""Where recordings go that were given no folder."""


def settings(given: Mapping[str, Any], program: Program) -> Config:
    """Read the settings; what no option and no variable says is said here: a run is recorded.

    Raises:
        ConfigError: an option or a variable is bad.
    """
    folder = Config.read(given, os.environ).record or _new_folder(program.name)
    # Absolute, since the program may change its working directory.
    return Config.read({**given, "record": folder.absolute()}, os.environ)


def run_recorded(program: Program, given: Mapping[str, Any], started: Callable[[Handle], None] = lambda _: None) -> int:
    """Instrument, run the program, print a summary and where to look; give the program's exit code.

    Args:
        program: What to run.
        given: Settings that were said.
        started: Called before the program is.
    """
    config = settings(given, program)
    home = Path.cwd()  # where the user's shell still is when the program has changed its own
    program.prepare()
    from torchotel import _handle  # noqa: PLC0415 - brings in torch: `torchotel --help` must not wait for it

    handle = _handle.start({**given, "record": config.record}, None, zero_code=True)
    process = os.getpid()
    started(handle)
    code = program.run()
    if os.getpid() != process:
        return code  # a child that the program forked has come out here too
    try:
        handle.end(finished=code == 0)
        sys.stderr.flush()
        _show(config, handle.stats(), home)
    except BrokenPipeError:
        sys.stderr.close()
    except Exception:  # noqa: BLE001 - the program has ended well or badly, and its exit code is what counts
        traceback.print_exc()
    return code


def _show(config: Config, stats: Mapping[str, Any], home: Path) -> None:
    if config.disabled or config.record is None:
        return
    folder = own_folder(config.record, os.environ)
    if not folder.is_dir():
        return
    run = open_run(folder)
    summary = summarise(run.units(), run.spans())
    print(f"\n{render(summary, run.info)}\n")
    shown = folder.relative_to(home) if folder.is_relative_to(home) else folder
    print(f"recorded in {shown}; again: torchotel summary {shown}")
    if config.traces_exporter == "otlp" and summary.steps + summary.evaluations:
        endpoint = config.public()["traces_endpoint"]
        print(f"{stats['spans_exported']:,} spans sent to {endpoint}, {stats['spans_dropped']:,} lost")


def _new_folder(name: str) -> Path:
    safe = re.sub(r"[^\w.-]+", "_", name) or "run"
    folder = RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{safe}"
    number = 2
    while folder.exists():
        folder = folder.with_name(f"{folder.name.removesuffix(f'-{number - 1}')}-{number}")
        number += 1
    return folder
