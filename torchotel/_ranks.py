"""What each rank of a run has for itself."""

from collections.abc import Mapping
from pathlib import Path

from torchotel._checks import LAST_PORT


def own_folder(record: Path, environ: Mapping[str, str]) -> Path:
    """Give this rank's folder of a run file: with several ranks each has one of its own."""
    if environ.get("WORLD_SIZE", "1") == "1":
        return record
    return record.with_name(f"{record.name}-rank{environ.get('RANK', '0')}")


def own_port(port: int, environ: Mapping[str, str]) -> int:
    """Give this rank's port: those of a host's ranks follow each other, and 0 stays any free one."""
    rank = environ.get("LOCAL_RANK", "0")
    own = port + int(rank) if port and rank.isdecimal() else port
    return own if own <= LAST_PORT else 0
