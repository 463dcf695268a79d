"""What runs: versions, and the name of the script."""

import sys
from pathlib import Path

import torch

from torchotel import _names as names


def versions() -> dict[str, str]:
    """Return the versions of torch and CUDA, by attribute."""
    found = {names.TORCH_VERSION: str(torch.__version__)}
    if torch.version.cuda is not None:
        found[names.CUDA_VERSION] = torch.version.cuda
    return found


def script_name() -> str:
    """Return the name of what runs, without its folder and its ending."""
    name = Path(sys.argv[0]).name.removesuffix(".py") if sys.argv else ""
    return name if name not in {"", "-c"} else "python"
