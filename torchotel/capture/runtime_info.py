"""The versions of torch and CUDA, and the name of the script."""

import sys
from pathlib import Path

import torch

from torchotel import _semconv as names


def versions() -> dict[str, str]:
    """Return the versions of torch and CUDA, by attribute."""
    found = {names.TORCH_VERSION: str(torch.__version__)}
    if torch.version.cuda is not None:
        found[names.CUDA_VERSION] = torch.version.cuda
    return found


def script_name() -> str:
    """Return the script's name without folder and ending, or the module's name as given to `python -m`."""
    path = sys.argv[0] if sys.argv else ""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if path and spec is not None and spec.origin == path:  # else it is that of a profiler, which runs a script
        return str(spec.name).removesuffix(".__main__")
    name = Path(path).name.removesuffix(".py")
    return name if name not in {"", "-c"} else "python"
