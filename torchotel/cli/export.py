"""Export a recorded run to Perfetto, to Jaeger's upload page, or to a server.

    torchotel export runs/today --format chrome    # for https://ui.perfetto.dev
    torchotel export runs/today --format otlp      # for Jaeger's upload page
    torchotel export runs/today --to http://localhost:4318

Without RUN, the newest run in torchotel-runs/ is exported. A run that was cut short is exported up to its last whole
line.

chrome writes one file of trace events. otlp writes a folder of OTLP/JSON lines, at most 50 traces in each file, or one
file if -o ends in .json or .jsonl. Existing files are kept unless --force is given.

--to sends all spans to an OTLP server, with headers, protocol, compression, certificates and timeout from the
OTEL_EXPORTER_OTLP_* variables. It waits when the server asks for it, and prints how many spans arrived. The exit code
is 1 if some did not. Span ids are those of the recording, so Jaeger shows a span once even if it was sent twice.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from torchotel._limits import MAX_UPLOAD_TRACES
from torchotel._utils.text import printable
from torchotel._utils.version import package_version
from torchotel.cli.summary import newest
from torchotel.cli.terminal import Progress, add_force, atomic_file, atomic_folder, private_file
from torchotel.config.config import Config
from torchotel.runs import Run, RunError, open_run
from torchotel.runs.chrome_trace import ChromeTrace
from torchotel.runs.jaeger_upload import Line, lines

if TYPE_CHECKING:
    from torchotel.exporters.otlp.replay import Replay

FILE_NAME, FILE_PATTERN = "traces-{:05d}.jsonl", "traces-*.jsonl"
_FILE_SUFFIXES = {".json", ".jsonl"}
_OFF = "OTEL_SDK_DISABLED"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--format", choices=("chrome", "otlp"), help="format to write; --to sends otlp")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="PATH", help="file or folder to write (default: named after RUN, here)"
    )
    add_force(parser)
    parser.add_argument("--to", metavar="ENDPOINT", help="base URL of an OTLP server to send to")


def call(arguments: argparse.Namespace) -> int:
    """Write files or send spans; return 1 if some spans did not arrive."""
    folder = arguments.run or newest()
    if arguments.to is None and arguments.format is None:
        raise RunError(f"{folder}: no format given: use --format chrome, --format otlp or --to ENDPOINT")
    if arguments.to is not None and (arguments.format == "chrome" or arguments.output is not None):
        raise RunError("--to sends OTLP and writes no file: remove --format chrome and -o")
    run = open_run(folder)
    if arguments.to is not None:
        return _send(run, arguments.to)
    name = folder.resolve().name
    if arguments.format == "chrome":
        return _write_chrome(run, arguments.output or Path(f"{name}.chrome.json"), force=arguments.force)
    return _write_otlp(run, arguments.output or Path(f"{name}-otlp"), force=arguments.force)


def _write_chrome(run: Run, output: Path, *, force: bool) -> int:
    with Progress(run.size_bytes) as progress, atomic_file(output, force=force) as file:
        progress.begin(f"reading {run.folder.name}")
        trace = ChromeTrace(replace(run, on_read=progress.advance))
        for chunk in trace.chunks():
            file.write(chunk)
    left_out = f", {trace.left_out:,} left out because they fit on no track" if trace.left_out else ""
    print(printable(f"{output}: {trace.spans:,} spans{left_out}; open it in https://ui.perfetto.dev"))
    return 0


def _write_otlp(run: Run, output: Path, *, force: bool) -> int:
    with Progress(run.size_bytes) as progress:
        progress.begin(f"reading {run.folder.name}")
        export_lines = lines(replace(run, on_read=progress.advance))
        write = _write_single_file if output.suffix in _FILE_SUFFIXES else _write_files
        files = write(export_lines, output, force=force)
    per_file = f", at most {MAX_UPLOAD_TRACES} traces in each" if files > 1 else ""
    message = f"{output}: {files:,} file{'' if files == 1 else 's'}{per_file}; upload on the search page of Jaeger"
    print(printable(message))
    return 0


def _write_single_file(export_lines: Iterator[Line], output: Path, *, force: bool) -> int:
    with atomic_file(output, force=force) as file:
        for line in export_lines:
            if line.file > 1:
                raise RunError(f"{output}: the run is too large for one file on Jaeger's page; name a folder with -o")
            file.write(line.text)
    return 1


def _write_files(export_lines: Iterator[Line], output: Path, *, force: bool) -> int:
    number = 0
    with atomic_folder(output, FILE_PATTERN, force=force) as folder:
        for number, group in groupby(export_lines, key=lambda line: line.file):
            with private_file(folder / FILE_NAME.format(number)) as file:
                file.writelines(line.text for line in group)
    return number


def _send(run: Run, endpoint: str) -> int:
    from torchotel.exporters.otlp import json_to_protobuf, replay, sender, transport  # noqa: PLC0415  # load OpenTelemetry

    # --to overrides OTEL_SDK_DISABLED, which disables telemetry of programs.
    environ = {name: value for name, value in os.environ.items() if name != _OFF}
    otlp_endpoint = Config.read({"endpoint": endpoint}, environ).otlp_endpoint("traces")
    connection = sender.make_transport(otlp_endpoint, transport.TRACES, version=package_version())
    replayed = replay.Replay(connection)
    sent_all = True
    try:
        with Progress(run.size_bytes) as progress:
            progress.begin(f"sending {run.folder.name}")
            for line in replace(run, on_read=progress.advance).requests():
                sent_all = replayed.add(line.request)
                if not sent_all:
                    break
                progress.begin(f"sending {run.folder.name}, {replayed.arrived:,} spans arrived")
            sent_all = sent_all and replayed.push()
    except json_to_protobuf.FOREIGN as error:
        raise RunError(f"{run.folder}: holds a span that torchotel does not write ({error})") from error
    finally:
        connection.close()
    return _report_result(run, replayed, connection.endpoint, sent_all=sent_all)


def _report_result(run: Run, replayed: Replay, endpoint: str, *, sent_all: bool) -> int:
    if sent_all and not replayed.rejected:
        print(f"{replayed.arrived:,} spans sent to {endpoint}")
        return 0
    total = sum(line.spans for line in run.requests())
    print(
        f"torchotel export: {replayed.arrived:,} of {total:,} spans arrived at {endpoint}: {replayed.failure}",
        file=sys.stderr,
    )
    return 1
