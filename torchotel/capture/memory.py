"""The memory of devices, as their allocator counts it."""

from __future__ import annotations

import torch

from torchotel._records import DeviceMemory
from torchotel._utils.faults import Guard
from torchotel.capture.seams import has_context


class Memory:
    """Ask the CUDA devices that this process uses; an allocator that keeps no count is asked once."""

    def __init__(self) -> None:
        self.guard = Guard("device memory", limit=1)

    def read(self) -> tuple[DeviceMemory, ...]:
        """Return the memory of each; none where it can't be told. Raises nothing, and waits for nothing."""
        if self.guard.is_off:
            return ()
        try:
            return device_memory()
        except Exception:  # noqa: BLE001  # what an allocator of the user's raises is of no matter to the step
            self.guard.fault()
            return ()


def device_memory() -> tuple[DeviceMemory, ...]:
    """Return the memory of the CUDA devices that this process uses; it waits for nothing.

    The peak is that since the program's start, or since it reset it.
    """
    if not torch.cuda.is_initialized():  # to ask any other would start CUDA
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        if not has_context(index):
            continue  # some allocators would start it
        stats = torch.cuda.memory_stats_as_nested_dict(index)
        if not stats or not stats["reserved_bytes"]["all"]["peak"]:
            continue
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        found.append(DeviceMemory(f"cuda:{index}", allocated["current"], reserved["current"], allocated["peak"]))
    return tuple(found)
