"""torchotel as a package."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache  # a file is read and parsed for it
def package_version() -> str:
    """Return the version of torchotel that is installed."""
    try:
        return version("torchotel")
    except PackageNotFoundError:  # a checkout on the path
        return "0.0.0"
