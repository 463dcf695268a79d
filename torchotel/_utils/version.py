"""The installed version of torchotel."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache  # reads and parses a file
def package_version() -> str:
    """Return the installed version of torchotel."""
    try:
        return version("torchotel")
    except PackageNotFoundError:  # a source checkout
        return "0.0.0"
