"""Export a recorded run to Perfetto, to Jaeger's upload page, or to a server.

    torchotel export runs/today --format chrome    # for https://ui.perfetto.dev
    torchotel export runs/today --format otlp      # for Jaeger's upload page
    torchotel export runs/today --to http://localhost:4318

Without RUN, the newest run in torchotel-runs/ is exported. A run that was cut short is exported up to its last whole
line. Of a run with several ranks, all ranks are exported.

chrome writes one file of trace events. otlp writes a folder of OTLP/JSON lines, at most 50 traces in each file, or one
file if -o ends in .json or .jsonl. Existing files are kept unless --force is given.

--to sends all spans to an OTLP server, with headers, protocol, compression, certificates and timeout from the
OTEL_EXPORTER_OTLP_* variables. It waits when the server asks for it, and prints how many spans arrived. The exit code
is 1 if some did not. Span ids are those of the recording, so Jaeger shows a span once even if it was sent twice.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import merge
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torchotel._limits import MAX_UPLOAD_BYTES, MAX_UPLOAD_TRACES
from torchotel._utils.installation import package_version
from torchotel._utils.text import printable
from torchotel.cli.summary import RUN_HELP, chosen
from torchotel.cli.terminal import Progress, add_force, atomic_file, atomic_folder, private_file
from torchotel.config.config import Config
from torchotel.runs import Run, RunError
from torchotel.runs.chrome_trace import ChromeTrace
from torchotel.runs.rank_folders import run_name
from torchotel.runs.reader import RequestLine

if TYPE_CHECKING:
    from torchotel.exporters.otlp.replay import Replay


FILE_NAME, FILE_PATTERN = "traces-{:05d}.jsonl", "traces-*.jsonl"
_FILE_SUFFIXES = {".json", ".jsonl"}
_OFF = "OTEL_SDK_DISABLED"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help=RUN_HELP)
    parser.add_argument("--format", choices=("chrome", "otlp"), help="format to write; --to sends otlp")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="PATH", help="file or folder to write (default: named after RUN, here)"
    )
    add_force(parser)
    parser.add_argument("--to", metavar="ENDPOINT", help="base URL of an OTLP server to send to")


def call(arguments: argparse.Namespace) -> int:
    """Write files or send spans; return 1 if some spans did not arrive."""
    if arguments.to is None and arguments.format is None:
        raise RunError("no format given: use --format chrome, --format otlp or --to ENDPOINT")
    if arguments.to is not None and (arguments.format == "chrome" or arguments.output is not None):
        raise RunError("--to sends OTLP and writes no file: remove --format chrome and -o")
    runs = chosen(arguments.run)
    if arguments.to is not None:
        return _send(runs, arguments.to)
    name = run_name(runs)
    if arguments.format == "chrome":
        return _write_chrome(runs, arguments.output or Path(f"{name}.chrome.json"), force=arguments.force)
    return _write_otlp(runs, arguments.output or Path(f"{name}-otlp"), force=arguments.force)


def _write_chrome(runs: Sequence[Run], output: Path, *, force: bool) -> int:
    with Progress(_size_bytes(runs)) as progress, atomic_file(output, force=force) as file:
        progress.begin(f"reading {run_name(runs)}")
        trace = ChromeTrace(*_shown(runs, progress))
        for chunk in trace.chunks():
            file.write(chunk)
    left_out = f", {trace.left_out:,} left out because they fit on no track" if trace.left_out else ""
    print(printable(f"{output}: {trace.spans:,} spans{left_out}; open it in https://ui.perfetto.dev"))
    return 0


def _size_bytes(runs: Sequence[Run]) -> int:
    return sum(run.size_bytes for run in runs)


def _shown(runs: Sequence[Run], progress: Progress) -> Sequence[Run]:
    """Return the runs so that reading them moves the progress display."""
    return [replace(run, on_read=progress.advance) for run in runs]


def _write_otlp(runs: Sequence[Run], output: Path, *, force: bool) -> int:
    with Progress(_size_bytes(runs)) as progress:
        progress.begin(f"reading {run_name(runs)}")
        export_lines = lines(*_shown(runs, progress))
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


def _send(runs: Sequence[Run], endpoint: str) -> int:
    from torchotel.exporters.otlp import json_to_protobuf, replay, sender, transport  # noqa: PLC0415  # load OpenTelemetry

    # --to overrides OTEL_SDK_DISABLED, which disables telemetry of programs.
    environ = {name: value for name, value in os.environ.items() if name != _OFF}
    otlp_endpoint = Config.read({"endpoint": endpoint}, environ).otlp_endpoint("traces")
    connection = sender.make_transport(otlp_endpoint, transport.TRACES, version=package_version())
    replayed = replay.Replay(connection)
    sent_all = True
    try:
        with Progress(_size_bytes(runs)) as progress:
            progress.begin(f"sending {run_name(runs)}")
            for line in chain.from_iterable(run.requests() for run in _shown(runs, progress)):
                sent_all = replayed.add(line.request)
                if not sent_all:
                    break
                progress.begin(f"sending {run_name(runs)}, {replayed.arrived:,} spans arrived")
            sent_all = sent_all and replayed.push()
    except json_to_protobuf.FOREIGN as error:
        raise RunError(f"{run_name(runs)}: holds a span that torchotel does not write ({error})") from error
    finally:
        connection.close()
    return _report_result(runs, replayed, connection.endpoint, sent_all=sent_all)


def _report_result(runs: Sequence[Run], replayed: Replay, endpoint: str, *, sent_all: bool) -> int:
    if sent_all and not replayed.rejected:
        print(f"{replayed.arrived:,} spans sent to {endpoint}")
        return 0
    total = sum(line.spans for run in runs for line in run.requests())
    print(
        f"torchotel export: {replayed.arrived:,} of {total:,} spans arrived at {endpoint}: {replayed.failure}",
        file=sys.stderr,
    )
    return 1


class Line(NamedTuple):
    """A line with its line break, and the number of its file, from 1."""

    file: int
    text: bytes


def lines(*runs: Run) -> Iterator[Line]:
    """Yield the lines of a run's traces in their order; lines of several ranks by time, so that a trace is in one file.

    Raises:
        RunError: A line is not valid OTLP/JSON; Jaeger's page would refuse the whole file.
    """
    traces: frozenset[str] = frozenset()
    file = size = 0
    for request, text in merge(*map(_texts, runs), key=lambda line: line[0].start_ns):
        if not file or len(traces | request.trace_ids) > MAX_UPLOAD_TRACES or size + len(text) > MAX_UPLOAD_BYTES:
            traces, size = frozenset(), 0
            file += 1
        traces |= request.trace_ids
        size += len(text)
        yield Line(file, text)


def _texts(run: Run) -> Iterator[tuple[RequestLine, bytes]]:
    return ((request, _text(run, request)) for request in run.requests())


def _text(run: Run, line: RequestLine) -> bytes:
    try:
        text = json.dumps(line.request, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        # Python's json module reads NaN and Infinity, which JSON does not allow.
        raise RunError(f"{run.folder}: holds a line that torchotel does not write ({error})") from error
    return text.encode("utf-8", "replace") + b"\n"
