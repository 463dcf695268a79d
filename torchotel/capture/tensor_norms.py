"""L2 norms of many tensors: one fused call for each device and dtype, read later.

Float32 sums of very many squares lose digits on the CPU (6e-4 at a million), so large tensors are split into pieces
there, whose norms are combined in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from torchotel.capture import torch_internals
from torchotel.capture.async_readback import AsyncReadback, can_compute, copy_async, unless_failed
from torchotel.capture.gradient_shards import is_partial

MAX_IN_PIECE = 1 << 16  # a piece loses 6e-5 at most
MAX_IN_BLOCK = 1 << 18  # elements of half precision that are copied at once
SUMMED_IN: dict[torch.dtype, torch.dtype | None] = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: None,
    torch.float64: None,
    torch.complex64: None,
    torch.complex128: None,
}
"""Supported dtypes, and the dtype that their squares are summed in if it is another one."""
EXACT = {torch.float64, torch.complex128}

Scale: TypeAlias = torch.amp.GradScaler | Tensor
"""The scale of gradients: a scaler, or the factor."""
Kind: TypeAlias = tuple[torch.device, torch.dtype, bool]
"""The key of a group: device, dtype, and whether a scaler has unscaled it."""


class Norms:
    """The norms of some tensors, which may not be ready.

    Args:
        count: The number of tensors.
        readbacks: For each device, the norms of pieces and the position of each piece's tensor.
        left_out: Tensors whose norms can't be known.
    """

    __slots__ = ("_count", "_readbacks", "left_out")

    def __init__(
        self, count: int, readbacks: list[tuple[AsyncReadback, list[int]]], left_out: Sequence[int] = ()
    ) -> None:
        self._count, self._readbacks, self.left_out = count, readbacks, left_out

    def ready(self) -> bool:
        """Return whether the norms are ready, without waiting."""
        return all(readback.ready() for readback, _ in self._readbacks)

    def wait(self) -> None:
        """Wait until the norms are ready."""
        for readback, _ in self._readbacks:
            readback.wait()

    def values(self) -> list[float | None] | None:
        """Return the norm of each tensor, None for a tensor that was left out; None if they are not ready."""
        pieces: list[list[float]] = [[] for _ in range(self._count)]
        for readback, positions in self._readbacks:
            values = readback.values()
            if len(values) != len(positions):
                return None
            for position, value in zip(positions, values, strict=True):
                pieces[position].append(value)
        return [combined(values) if len(values) > 1 else values[0] if values else None for values in pieces]


class _Group:
    """Tensors of one device and dtype.

    Args:
        first: The first tensor.
    """

    def __init__(self, first: Tensor) -> None:
        self.tensors: list[Tensor] = []
        self.positions: list[int] = []
        self._summed_in = SUMMED_IN[first.dtype]
        self._blocks: list[tuple[Tensor, int]] = []
        self._most = MAX_IN_PIECE if first.device.type == "cpu" and first.dtype not in EXACT else math.inf

    def add(self, tensor: Tensor, position: int) -> None:
        """Add a tensor, in pieces if its sum would lose digits."""
        if tensor.numel() <= self._most:
            self.tensors.append(tensor)
            self.positions.append(position)
            return
        flat = _flat(tensor)
        if flat is None:
            pieces = _pieces(tensor)
        else:  # one call for each block
            whole = len(flat) - len(flat) % MAX_IN_PIECE
            rows = flat[:whole]
            blocks = [rows] if self._summed_in is None else rows.split(MAX_IN_BLOCK)
            self._blocks += [(block, position) for block in blocks]
            pieces = [flat[whole:]] if whole < len(flat) else []
        self.tensors += pieces
        self.positions += [position] * len(pieces)

    def norms(self) -> tuple[list[Tensor], list[int]]:
        """Compute the norms of all pieces; return them with the positions of their tensors."""
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
    """Return the norm over several parts without overflow; NaN if one of them is NaN."""
    return math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)


def norms_async(
    tensors: Sequence[Tensor],
    scale: Scale | None = None,
    unscaled: Collection[int] = (),
    skipped: Collection[int] = (),
) -> Norms | None:
    """Compute the norm of each tensor, unseen by modes and without waiting; return None if no norm can be known.

    A tensor of an unknown layout, without numbers or with a partial sum is left out.

    Args:
        tensors: For a sharded tensor this process's shard counts; sparse values at one index are summed.
        scale: The factor on the tensors.
        unscaled: Positions of the tensors without it.
        skipped: Positions of the tensors whose norms are not wanted.
    """
    if not can_compute():
        return None
    with unless_failed(), torch_internals.unseen():
        groups: dict[Kind, _Group] = {}
        left_out = []
        for position, tensor in enumerate(tensors):
            if position in skipped:
                continue
            dense = tensor if _is_ordinary(tensor) else _dense(tensor)
            if dense is None:
                left_out.append(position)
                continue
            key = dense.device, dense.dtype, position in unscaled
            group = groups.get(key)
            if group is None:
                group = groups[key] = _Group(dense)
            group.add(dense, position)
        readbacks = _read(groups, scale) if groups or skipped else None
        return None if readbacks is None else Norms(len(tensors), readbacks, left_out)
    return None


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
    return norms[0] if len(norms) == 1 else torch.cat(norms)  # accepts different dtypes


def _is_ordinary(tensor: Tensor) -> bool:
    """Return whether a tensor can be used as it is: a quick check for most tensors."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.dtype in SUMMED_IN
        and not torch_internals.is_transformed(tensor)
        and not tensor.is_nested
        and not tensor.is_meta
    )


def _dense(tensor: Tensor) -> Tensor | None:
    """Return a plain dense tensor with the same norm; None if there is none."""
    if not torch_internals.is_plain(tensor):
        to_local = getattr(tensor, "to_local", None)
        if to_local is None or is_partial(tensor):
            return None
        tensor = to_local()  # of a DTensor: without gradients it returns an attribute
        if not torch_internals.is_plain(tensor):
            return None
    if tensor.device.type == "meta" or tensor.dtype not in SUMMED_IN or tensor.is_nested:
        return None
    if tensor.layout is torch.strided:
        return tensor
    return _summed(tensor) if tensor.layout is torch.sparse_coo else None


def _summed(tensor: Tensor) -> Tensor:
    """Return the values of a sparse tensor, with those at one index summed.

    `coalesce` would wait for the device to count the indices; here there are as many sums as values.
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
    """Return a dense tensor as one block of memory, in any order; None if it has gaps."""
    if not tensor.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return tensor.view(-1) if tensor.is_contiguous() else None


def _pieces(tensor: Tensor) -> list[Tensor]:
    """Split a tensor with gaps into views."""
    count = tensor.numel()
    if count <= MAX_IN_PIECE:
        return [tensor]
    # Along the longest stride each piece is one block of memory: other pieces take four times as long.
    wide = [dimension for dimension, size in enumerate(tensor.shape) if size > 1]
    dimension = max(wide, key=tensor.stride)
    cut = tensor.chunk(min(tensor.shape[dimension], -(-count // MAX_IN_PIECE)), dimension)
    return [piece for chunk in cut for piece in _pieces(chunk)]
