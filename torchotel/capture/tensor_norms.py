"""L2 norms of many tensors: one fused call for each device and type, read later.

Float32 sums of very many squares lose digits on the CPU (6e-4 at a million), so large tensors go in pieces there,
whose norms are put together in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from torchotel.capture import torch_internals
from torchotel.capture.async_readback import AsyncReadback, can_compute, copy_async

MAX_IN_PIECE = 1 << 16  # then they lose 6e-5 at most
MAX_IN_BLOCK = 1 << 18  # what is copied at once of half precision
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

Scale: TypeAlias = torch.amp.GradScaler | Tensor
"""By which gradients are too large: a scaler's, or the number itself."""
Kind: TypeAlias = tuple[torch.device, torch.dtype, bool]
"""Of a group: device, type, and whether a scaler has brought it back already."""


class Norms:
    """The norms of some tensors, on their way.

    Args:
        count: Of tensors.
        readings: For each device, norms of pieces and which tensor each piece belongs to.
        left_out: Tensors whose norms can't be known.
    """

    __slots__ = ("_count", "_readbacks", "left_out")

    def __init__(
        self, count: int, readbacks: list[tuple[AsyncReadback, list[int]]], left_out: Sequence[int] = ()
    ) -> None:
        self._count, self._readbacks, self.left_out = count, readbacks, left_out

    def ready(self) -> bool:
        """Tell whether they are there, without waiting."""
        return all(readback.ready() for readback, _ in self._readbacks)

    def wait(self) -> None:
        """Wait until they are there."""
        for readback, _ in self._readbacks:
            readback.wait()

    def values(self) -> list[float | None] | None:
        """Return the norm of each tensor, None for one that was left out; None where they are not ready."""
        pieces: list[list[float]] = [[] for _ in range(self._count)]
        for readback, positions in self._readbacks:
            values = readback.values()
            if len(values) != len(positions):
                return None
            for position, value in zip(positions, values, strict=True):
                pieces[position].append(value)
        return [combined(values) if len(values) > 1 else values[0] if values else None for values in pieces]


class _Group:
    """Tensors of one device and type.

    Args:
        first: Of them.
    """

    def __init__(self, first: Tensor) -> None:
        self.tensors: list[Tensor] = []
        self.positions: list[int] = []
        self._summed_in = SUMMED_IN[first.dtype]
        self._blocks: list[tuple[Tensor, int]] = []
        self._most = MAX_IN_PIECE if first.device.type == "cpu" and first.dtype not in EXACT else math.inf

    def add(self, tensor: Tensor, position: int) -> None:
        """Take one in, in pieces where its sum would lose digits."""
        if tensor.numel() <= self._most:
            self.tensors.append(tensor)
            self.positions.append(position)
            return
        flat = _flat(tensor)
        if flat is None:
            pieces = _pieces(tensor)
        else:  # rows of matrices: no more calls than there are blocks
            whole = len(flat) - len(flat) % MAX_IN_PIECE
            rows = flat[:whole]
            blocks = [rows] if self._summed_in is None else rows.split(MAX_IN_BLOCK)
            self._blocks += [(block, position) for block in blocks]
            pieces = [flat[whole:]] if whole < len(flat) else []
        self.tensors += pieces
        self.positions += [position] * len(pieces)

    def norms(self) -> tuple[list[Tensor], list[int]]:
        """Compute the norms of all pieces, and say which tensor each belongs to."""
        positions, wide = [*self.positions], self._summed_in
        norms = [torch.stack([*torch_internals.norms(self.tensors, wide)])] if self.tensors else []
        buffer = torch.empty(MAX_IN_BLOCK, dtype=wide, device="cpu") if self._blocks and wide is not None else None
        for block, position in self._blocks:
            summed = block if buffer is None else buffer[: len(block)].copy_(block)
            rows = summed.view(-1, MAX_IN_PIECE)
            norms.append(torch.linalg.vector_norm(rows, dim=1))
            positions += [position] * len(rows)
        return norms, positions


def combined(norms: Sequence[float]) -> float:
    """Return the norm over several parts; it does not overflow, and is not a number where one of them is not."""
    return math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)


def norms_async(tensors: Sequence[Tensor], scale: Scale | None = None, unscaled: Collection[int] = ()) -> Norms | None:
    """Compute the norm of each tensor, unseen and without waiting; None where none of them can be known.

    A tensor whose own norm can't be known is left out: of an unknown layout, or without numbers.

    Args:
        tensors: Sharded ones count with what this process holds, sparse ones with what is in one place summed.
        scale: By which they are too large.
        unscaled: Places of those that are not.
    """
    if not can_compute():
        return None
    with torch_internals.unseen():
        groups: dict[Kind, _Group] = {}
        left_out = []
        for position, tensor in enumerate(tensors):
            dense = tensor if _is_ordinary(tensor) else _dense(tensor)
            if dense is None:
                left_out.append(position)
                continue
            key = dense.device, dense.dtype, position in unscaled
            group = groups.get(key)
            if group is None:
                group = groups[key] = _Group(dense)
            group.add(dense, position)
        readbacks = _read(groups, scale) if groups else None
        return None if readbacks is None else Norms(len(tensors), readbacks, left_out)


def _read(groups: Mapping[Kind, _Group], scale: Scale | None) -> list[tuple[AsyncReadback, list[int]]] | None:
    by_device: dict[torch.device, tuple[list[Tensor], list[int]]] = {}
    for (device, _, unscaled), group in groups.items():
        norms, positions = group.norms()
        if scale is not None and not unscaled:
            factor = torch_internals.scale_of(scale, device)
            if factor is None:
                return None
            norms = [norm / factor for norm in norms]
        found = by_device.setdefault(device, ([], []))
        found[0].extend(norms)
        found[1].extend(positions)
    return [(copy_async(_joined(norms)), positions) for norms, positions in by_device.values()]


def _joined(norms: list[Tensor]) -> Tensor:
    return norms[0] if len(norms) == 1 else torch.cat(norms)  # which takes types that differ


def _is_ordinary(tensor: Tensor) -> bool:
    """Tell, for the most of them quickly, whether a tensor can be taken as it is."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.dtype in SUMMED_IN
        and not torch_internals.is_transformed(tensor)
        and not tensor.is_nested
        and not tensor.is_meta
    )


def _dense(tensor: Tensor) -> Tensor | None:
    """Return a plain dense tensor with the same norm; None where there is none."""
    if not torch_internals.is_plain(tensor):
        to_local = getattr(tensor, "to_local", None)
        if to_local is None:
            return None
        tensor = to_local()  # of a DTensor: without gradients it is no more than an attribute
        if not torch_internals.is_plain(tensor):
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
    indices, values = torch_internals.sparse_parts(tensor)
    if tensor.is_coalesced() or len(values) == 0:
        return values
    key = indices[0]
    for index, size in zip(indices[1:], tensor.shape[1:], strict=False):
        key = key * size + index
    key, order = key.sort()
    position = torch.zeros_like(key)
    position[1:] = (key[1:] != key[:-1]).cumsum(0)
    wide = values.to(SUMMED_IN[values.dtype] or values.dtype)
    return torch.zeros_like(wide).index_add_(0, position, wide[order])


def _flat(tensor: Tensor) -> Tensor | None:
    """Return a dense tensor as one stretch of memory, in whatever order; None where it has gaps."""
    if not tensor.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return tensor.view(-1) if tensor.is_contiguous() else None


def _pieces(tensor: Tensor) -> list[Tensor]:
    """Cut a tensor that has gaps into views."""
    count = tensor.numel()
    if count <= MAX_IN_PIECE:
        return [tensor]
    # Across the longest stride each piece is one stretch of memory: others take four times as long.
    wide = [dimension for dimension, size in enumerate(tensor.shape) if size > 1]
    dimension = max(wide, key=tensor.stride)
    cut = tensor.chunk(min(tensor.shape[dimension], -(-count // MAX_IN_PIECE)), dimension)
    return [piece for chunk in cut for piece in _pieces(chunk)]
