"""Read `run.json`, which may be a stranger's: what is not of its form is left out."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_INFO_BYTES = 4 * 1024 * 1024
"""Settings, a resource and a few numbers take some kilobytes."""

_MOST = 2**63
_FORM: Mapping[str, type | Mapping[str, type]] = {
    "torchotel.version": str,
    "run_id": str,
    "service_name": str,
    "started_unix_nano": str,
    "finished": bool,
    "config": dict,
    "resource": dict,
    "error": {"type": str, "message": str},
    "model": {"name": str, "modules": int, "parameters": int},
    "recording": {"segments_deleted": int, "spans_deleted": int, "steps_dropped": int},
}


class RunError(Exception):
    """Say which folder or file cannot be read as a run, and why."""


def read_info(path: Path) -> Mapping[str, Any]:
    """Read what a run says of itself; empty where the run ended before that was whole.

    Raises:
        RunError: The file cannot be read, or is too large to be looked at.
    """
    if not path.is_file():  # a pipe would let us wait for ever
        return {}
    try:
        with path.open("rb") as file:
            text = file.read(MAX_INFO_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from error
    if len(text) > MAX_INFO_BYTES:
        raise RunError(f"{path}: has more than {MAX_INFO_BYTES:,} bytes")
    try:
        info = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return _formed(info, _FORM) if isinstance(info, dict) else {}


def _formed(values: Mapping[str, Any], form: Mapping[str, type | Mapping[str, type]]) -> dict[str, Any]:
    formed = {}
    for name, value in values.items():
        kind = form.get(name)
        if isinstance(kind, Mapping):
            if isinstance(value, dict):
                formed[name] = _formed(value, kind)
        elif kind is None or (type(value) is kind and not (isinstance(value, int) and abs(value) > _MOST)):
            formed[name] = value
    return formed
