"""L2 norms of many tensors: one fused call for each device and type, read later.

Float32 sums of very many squares lose digits on the CPU (6e-4 at 16 million), so large tensors go in pieces there,
whose norms are put together in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchotel.capture import seams
from torchotel.capture.readings import Reading, can_compute, copy_later

MOST_IN_PIECE = 1 << 20
SUMMED_IN: dict[torch.dtype, torch.dtype | None] = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: None,
    torch.float64: None,
    torch.complex64: None,
    torch.complex128: None,
}
"""Types whose norms are known, and the type that their squares are summed in where it is not their own."""
EXACT = {torch.float64, torch.complex128}


class Norms:
    """The norms of some tensors, on their way.

    Args:
        count: Of tensors.
        readings: For each device, norms of pieces and which tensor each piece belongs to.
    """

    __slots__ = ("_count", "_readings")

    def __init__(self, count: int, readings: list[tuple[Reading, list[int]]]) -> None:
        self._count, self._readings = count, readings

    def ready(self) -> bool:
        """Tell whether they are there, without waiting."""
        return all(reading.ready() for reading, _ in self._readings)

    def wait(self) -> None:
        """Wait until they are there."""
        for reading, _ in self._readings:
            reading.wait()

    def values(self) -> list[float] | None:
        """Return the norm of each tensor; None where they are not ready."""
        pieces: list[list[float]] = [[] for _ in range(self._count)]
        for reading, places in self._readings:
            values = reading.values()
            if len(values) != len(places):
                return None
            for place, value in zip(places, values, strict=True):
                pieces[place].append(value)
        return [combined(values) for values in pieces]


def combined(norms: Sequence[float]) -> float:
    """Return the norm over several parts; it does not overflow, and is not a number where one of them is not."""
    return math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)


def norms_later(tensors: Sequence[Tensor], scaler: torch.amp.GradScaler | None = None) -> Norms | None:
    """Compute the norm of each tensor, unseen and without waiting; None where one of them can't be known.

    Args:
        tensors: Sharded ones count with what this process holds, sparse ones with what is in one place summed.
        scaler: By whose scale they are too large.
    """
    if not can_compute():
        return None
    with seams.unseen():
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[int]]] = {}
        for place, tensor in enumerate(tensors):
            dense = _dense(tensor)
            if dense is None:
                return None
            pieces, places = groups.setdefault((dense.device, dense.dtype), ([], []))
            found = _pieces(dense)
            pieces += found
            places += [place] * len(found)
        by_device: dict[torch.device, tuple[list[Tensor], list[int]]] = {}
        for (device, dtype), (pieces, places) in groups.items():
            norms, owners = by_device.setdefault(device, ([], []))
            norms += seams.norms(pieces, SUMMED_IN[dtype])
            owners += places
        return _read(len(tensors), by_device, scaler)


def _read(
    count: int, by_device: dict[torch.device, tuple[list[Tensor], list[int]]], scaler: torch.amp.GradScaler | None
) -> Norms | None:
    readings = []
    for device, (norms, places) in by_device.items():
        together = torch.stack(norms)
        if scaler is not None:
            scale = seams.scale_of(scaler, device)
            if scale is None:
                return None
            together = together / scale
        readings.append((copy_later(together), places))
    return Norms(count, readings)


def _dense(tensor: Tensor) -> Tensor | None:
    """Return a plain dense tensor with the same norm; None where there is none."""
    if not seams.is_plain(tensor):
        to_local = getattr(tensor, "to_local", None)
        if to_local is None:
            return None
        tensor = to_local()  # of a DTensor: without gradients it is no more than an attribute
        if not seams.is_plain(tensor):
            return None
    if tensor.device.type == "meta" or tensor.dtype not in SUMMED_IN or tensor.is_nested:
        return None
    if tensor.layout is torch.strided:
        return tensor
    return _summed(tensor) if tensor.layout is torch.sparse_coo else None


def _summed(tensor: Tensor) -> Tensor:
    """Return the values of a sparse tensor, what is in one place summed.

    `coalesce` would wait for the device to know how many places there are; here there are as many as values.
    """
    indices, values = seams.sparse_parts(tensor)
    if tensor.is_coalesced() or len(values) == 0:
        return values
    key = indices[0]
    for index, size in zip(indices[1:], tensor.shape[1:], strict=False):
        key = key * size + index
    key, order = key.sort()
    place = torch.zeros_like(key)
    place[1:] = (key[1:] != key[:-1]).cumsum(0)
    wide = values.to(SUMMED_IN[values.dtype] or values.dtype)
    return torch.zeros_like(wide).index_add_(0, place, wide[order])


def _pieces(tensor: Tensor) -> list[Tensor]:
    """Cut a large tensor into views, where its sum would lose digits."""
    count = tensor.numel()
    if count <= MOST_IN_PIECE or tensor.device.type != "cpu" or tensor.dtype in EXACT:
        return [tensor]
    # Across the longest stride each piece is one stretch of memory: others take four times as long.
    wide = [dimension for dimension, size in enumerate(tensor.shape) if size > 1]
    dimension = max(wide, key=tensor.stride)
    cut = tensor.chunk(min(tensor.shape[dimension], -(-count // MOST_IN_PIECE)), dimension)
    return [piece for chunk in cut for piece in _pieces(chunk)]
