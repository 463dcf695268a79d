"""A model and its batch, from where the user says they are."""

import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchotel.doctor.trouble import Trouble

_HERE = Path(__file__).parents[1]


class Loaded(NamedTuple):
    """A model, and what it is called with."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def load(where: str, inputs: Sequence[tuple[tuple[int, ...], str]]) -> Loaded:
    """Import `module:name` and make a model of it, with a batch.

    Args:
        where: A module of torch, or what gives one, or one and its batch, when it is called without arguments.
        inputs: Shape and dtype of each input; empty: the batch comes with the model.

    Raises:
        Trouble: There is none, or it cannot be made.
    """
    found = _make(where)
    batch: Any = ()
    if isinstance(found, tuple) and len(found) == 2:  # noqa: PLR2004 - a model and its batch
        found, batch = found
    if not isinstance(found, torch.nn.Module):
        got = f"{where} is of type {type(found).__qualname__}"
        raise Trouble(got, "It must be a torch.nn.Module, (model, batch), or a function that returns one of them.")
    if inputs:
        device = next((parameter.device for parameter in found.parameters()), torch.device("cpu"))
        batch = tuple(_tensor(shape, dtype, device) for shape, dtype in inputs)
    if isinstance(batch, Mapping):
        return Loaded(found, (), batch)
    return Loaded(found, batch if isinstance(batch, tuple) else (batch,), {})


def describe(error: BaseException) -> str:
    """Say an exception in one line, with the last place of the user's where it went through."""
    text = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text


def _is_users(file: str) -> bool:
    return not (
        file.startswith("<") or "site-packages" in file or Path(file).is_relative_to(_HERE) or "/lib/python" in file
    )


def _make(where: str) -> Any:
    module, _, name = where.partition(":")
    advice = "Write it as MODULE:NAME, as Python imports it from this folder."
    with _no_telemetry():
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
            advice = "It is called without arguments: name a function that creates the model without arguments."
            return found if isinstance(found, torch.nn.Module) or not callable(found) else found()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
            raise Trouble(f"{where} could not be loaded: {describe(error)}", advice) from None


@contextmanager
def _no_telemetry() -> Iterator[None]:
    """Find modules in the working directory, and let a script's own `instrument()` do nothing."""
    before = os.environ.get("OTEL_SDK_DISABLED")
    os.environ["OTEL_SDK_DISABLED"] = "true"
    path = str(Path.cwd())
    sys.path.insert(0, path)
    try:
        yield
    finally:
        sys.path.remove(path)
        if before is None:
            del os.environ["OTEL_SDK_DISABLED"]
        else:
            os.environ["OTEL_SDK_DISABLED"] = before


def _tensor(shape: tuple[int, ...], name: str, device: torch.device) -> torch.Tensor:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise Trouble(f"--input: torch has no dtype {name}", "Use a dtype of torch, like float32, bfloat16 or int64.")
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=dtype, device=device)  # a valid index into any embedding
