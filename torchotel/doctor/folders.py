"""Folders that are written to: the run file's, and the one that Prometheus watches."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from torchotel._config import Config
from torchotel._ranks import identify, own_folder
from torchotel.doctor.finding import Finding, failed, ok, warning
from torchotel.exporters.runfile import LIMIT_BYTES, METRICS_NAME

SUBJECT = "folders"
_MIB = 1024 * 1024
_LEAST_BYTES = 16 * _MIB
_PROBE_BYTES = 4096


def check(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Write a file for a moment, and look at the room on the disk."""
    if config.record is None:
        yield ok(SUBJECT, "no run file is configured (record); torchotel run writes one to torchotel-runs")
    else:
        yield _check(own_folder(config.record, identify(environ)), "record")
    if config.discovery_dir is not None:
        yield _check(config.discovery_dir, "discovery_dir")


def _check(folder: Path, setting: str) -> Finding:
    shown = f"{setting} {folder}"
    if setting == "record" and (folder / METRICS_NAME).exists():
        return ok(
            SUBJECT, f"{shown} holds a run already; the next run is recorded beside it, and a warning names the folder"
        )
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing, prefix=".torchotel-doctor-") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
    except OSError as error:
        what = f"{shown} cannot be written to: {error.strerror}" + (f" ({existing})" if existing != folder else "")
        return failed(SUBJECT, what, "Set a folder that this user can write to, on a disk with free space.")
    free_bytes = shutil.disk_usage(existing).free
    text = f"{shown} can be written to, {free_bytes / _MIB:,.0f} MiB are free"
    if setting != "record" or free_bytes >= LIMIT_BYTES:
        return ok(SUBJECT, text)
    needs = f"A run file grows to {LIMIT_BYTES // _MIB} MiB at most. Recording stops if the disk is full."
    return (failed if free_bytes < _LEAST_BYTES else warning)(SUBJECT, text, needs)
