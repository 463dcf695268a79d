"""Run a script, record each training step as a trace, and print a summary.

    torchotel run train.py --epochs 3
    torchotel run --detail all --no-shapes -m package.train --epochs 3
    torchotel run --nproc-per-node 4 train.py

The program runs as under python, and the command returns its exit code. Options of torchotel come before the program.
The program is instrumented when it imports torch, in this process only; opentelemetry-instrument also instruments the
processes that a program starts. `-` is a script on standard input. A setting without an option is read from the
variable in brackets.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torchotel._auto_instrument import start_with_torch
from torchotel._limits import MAX_MESSAGE
from torchotel._types import ConfigError
from torchotel._utils.faults import exit_cause
from torchotel._utils.text import cut
from torchotel.cli.options import add_options, flag_of, read_options
from torchotel.cli.python_program import Program, is_runnable
from torchotel.cli.run_ranks import run_ranks
from torchotel.cli.terminal import Terminal
from torchotel.config.config import Config
from torchotel.runs import RunError, describe, open_run, render, run_failure, summarise

if TYPE_CHECKING:
    from torchotel._handle import Handle
    from torchotel.worker.stats import Stats


RUNS = Path("torchotel-runs")
"""Folder that contains the run folders if no folder is set."""


def settings(explicit: Mapping[str, Any], program: Program) -> Config:
    """Read the settings from options and variables; without a folder for the run file, a new one is chosen.

    Raises:
        ConfigError: An option or a variable is invalid.
    """
    config = Config.read(explicit, os.environ)
    return dataclasses.replace(config, record=_folder(config, program))


def run_recorded(
    program: Program,
    explicit: Mapping[str, Any],
    started: Callable[[Handle], None] = lambda _: None,
    *,
    quiet: bool = False,
    note_folder_in: Path | None = None,
) -> int:
    """Run the program, instrumented when it imports torch; return its exit code.

    The summary is printed at exit, after the program's threads and its own `atexit` functions have ended.

    Args:
        program: The program to run.
        explicit: Settings from the command line.
        started: Called with the handle when the program has imported torch.
        quiet: Print problems only.
        note_folder_in: Folder for a file with the path of the run folder; None: it is not noted.

    Raises:
        ConfigError: A setting is invalid.
        SystemExit: The program raised it.
        KeyboardInterrupt: The program was interrupted.
    """
    recording = _Recording(
        settings(explicit, program), tuple(explicit), started, quiet=quiet, note_folder_in=note_folder_in
    )
    program.prepare()
    start_with_torch(
        {**explicit, "record": recording.config.record},
        defer_start=False,
        failed=_exit_on_error,
        started=recording.start,
    )
    try:
        code = program.run()
    except SystemExit as error:
        recording.finished = error.code in (None, 0)
        recording.error = exit_cause(error).with_traceback(None)  # a traceback keeps the program's tensors
        raise
    recording.finished = code == 0
    return code


class _Recording:
    """Ends the recording at exit, and prints the summary."""

    def __init__(
        self,
        config: Config,
        explicit: Sequence[str],
        started: Callable[[Handle], None],
        *,
        quiet: bool,
        note_folder_in: Path | None,
    ) -> None:
        self.config = config
        self.finished = False
        """Whether the program ended normally."""
        self.error: BaseException | None = None
        """The `sys.exit()` that ended the program, or the exception whose handler called it."""
        self._explicit = explicit
        self._started = started
        self._quiet, self._note_folder_in = quiet, note_folder_in
        self._process = os.getpid()
        self._home = Path.cwd()  # the shell's directory; the program may change its own
        self._handle: Handle | None = None
        atexit.register(self._end)

    def start(self, handle: Handle) -> None:
        """Store the handle, and move the end of the recording before the handle's own `atexit` function."""
        self._handle = handle
        atexit.unregister(self._end)
        atexit.register(self._end)  # runs before the handle's function, which does not know the exit code
        self._note_folder(handle)  # a signal may end the process
        self._started(handle)

    def _note_folder(self, handle: Handle) -> None:
        if self._note_folder_in is not None and handle.record_folder is not None:
            (self._note_folder_in / str(self._process)).write_text(str(handle.record_folder))

    def _end(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child has inherited the `atexit` function
        try:
            if self.config.disabled:
                if not self._quiet:
                    _note("nothing was recorded: OTEL_SDK_DISABLED or the file of OTEL_CONFIG_FILE disables torchotel")
            elif self._handle is not None:
                error: BaseException | None = None if self.finished else self.error or getattr(sys, "last_value", None)
                self._handle.end(finished=self.finished, error=error)
                self._note_folder(self._handle)  # the program's call of `instrument()` may have changed it
                sys.stderr.flush()
                self._note_overridden(self._handle.config)
                self._show(self._handle.config, self._handle.record_folder, self._handle.stats())
                sys.stdout.flush()
            elif self.finished and "torch" not in sys.modules:
                _note("the program did not import torch, so nothing was recorded")
        except BrokenPipeError:
            sys.stderr.close()  # Python would report the error again at exit
        except KeyboardInterrupt:
            _note("interrupted; the recording up to here is kept")
        except RunError as error:
            _note(f"the recording cannot be summarised: {cut(error, MAX_MESSAGE)}")
        except Exception:  # noqa: BLE001 - a failing summary must not change the program's exit code
            traceback.print_exc()

    def _note_overridden(self, config: Config) -> None:
        """Name the options that the program's call of `instrument()` overrides."""
        shown = config.public()
        overridden = [
            f"{name}={shown[name]!r} over {flag_of(name)}" if name in shown else f"{name} over {flag_of(name)}"
            for name in self._explicit
            if getattr(config, name) != getattr(self.config, name)
        ]
        if overridden:
            _note(f"the program's call of instrument() overrides options: {', '.join(overridden)}")

    def _show(self, config: Config, folder: Path | None, stats: Stats) -> None:
        if folder is None:
            return
        shown = folder.relative_to(self._home) if folder.is_relative_to(self._home) else folder
        if not folder.is_dir():
            if stats["spans_recorded"]:
                _note(f"{shown}: the recording no longer exists")
            elif self._note_folder_in is None:  # else the process that started the ranks says it once
                advice = (
                    "If the program starts processes that train, set TORCHOTEL_RECORD and run it as "
                    "opentelemetry-instrument python …"
                )
                _note(
                    "no training step and no evaluation was seen, so nothing was recorded."
                    f"{' ' + advice if self.finished else ''}"
                )
            return
        if not self._quiet:
            self._print_summary(config, folder, shown, stats)
        dropped_spans = stats["spans_dropped"]
        if config.traces_exporter == "otlp" and dropped_spans:
            endpoint = config.public()["endpoint"]
            _note(
                f"{dropped_spans:,} spans did not reach {endpoint}; the recording has them. "
                f"To send them to a server: torchotel export {shown} --to {endpoint}"
            )

    def _print_summary(self, config: Config, folder: Path, shown: Path, stats: Stats) -> None:
        run = open_run(folder)
        records = list(run.records())
        summary = summarise(records, run.spans())
        print(f"\n{render(summary, run.info, output=Terminal())}\n")
        failure = run_failure(summary, run.info)
        if failure is not None:
            print(f"the program ended with {describe(failure)}")
        print(f"recorded in {shown}")
        print(f"  torchotel report {shown}     writes one HTML page of it")
        print(f"  torchotel summary {shown}    prints these tables again")
        sent_spans = stats["spans_exported"]
        if config.traces_exporter == "otlp" and sent_spans:
            print(f"{sent_spans:,} spans sent to {config.public()['traces_endpoint']}")
            detailed = [record for record in records if record.kind == "step" and record.detailed]
            if detailed:
                print(f"  trace {detailed[-1].trace_id} is step {detailed[-1].number}, with its layers")


def _exit_on_error(error: ConfigError) -> NoReturn:
    """End with the exit code of invalid settings, so that the program does not run unrecorded."""
    _note(str(error))
    sys.exit(2)


def _note(text: str) -> None:
    print(f"torchotel: {text}", file=sys.stderr)


def _folder(config: Config, program: Program) -> Path:
    """Return the folder of the settings, or a new one; absolute, since the program may change its working directory."""
    safe = re.sub(r"[^\w.-]+", "_", program.name) or "run"
    return (config.record or RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{safe}").absolute()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = "%(prog)s [OPTIONS] {SCRIPT | -m MODULE | -} [ARGS ...]"
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument(
        "--nproc-per-node", metavar="N", help="run N ranks of the program on this host, or one for each GPU: gpu"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print only problems at the end")
    parser.add_argument("--note-folder-in", type=Path, help=argparse.SUPPRESS)  # the command starts itself on each rank
    parser.add_argument("program", nargs=argparse.REMAINDER, help="script or module, and its own arguments")
    add_options(parser)


def call(arguments: argparse.Namespace) -> int:
    """Run and record the program; return its exit code, or 2 if there is no script."""
    words = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not words:
        print("torchotel run: no script given; see torchotel run --help", file=sys.stderr)
        return 2
    program = Program(words[0], tuple(words[1:]), arguments.module)
    if not program.module and not is_runnable(program.target):
        problem = f"cannot read the script {program.target!r}; name a readable script, or a module with -m"
        print(f"torchotel run: {problem}", file=sys.stderr)
        return 2
    explicit = read_options(arguments)
    if arguments.nproc_per_node is not None:
        folder = _folder(Config.read(explicit, os.environ), program)
        return run_ranks(arguments.nproc_per_node, program, arguments, folder)
    return run_recorded(program, explicit, quiet=arguments.quiet, note_folder_in=arguments.note_folder_in)
