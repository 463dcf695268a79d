"""torchotel as a package."""

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """Return the version of torchotel that is installed."""
    try:
        return version("torchotel")
    except PackageNotFoundError:  # a checkout on the path
        return "0.0.0"
