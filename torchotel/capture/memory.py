"""The memory of devices, as their allocator counts it."""

import torch

from torchotel._records import DeviceMemory


def device_memory() -> tuple[DeviceMemory, ...]:
    """Return the memory of the CUDA devices that this process uses; it waits for nothing.

    The peak is that since the program's start, or since it reset it.
    """
    if not torch.cuda.is_initialized():  # to ask any other would start CUDA
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        stats = torch.cuda.memory_stats_as_nested_dict(index)
        if not stats or not stats["reserved_bytes"]["all"]["peak"]:
            continue
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        found.append(DeviceMemory(f"cuda:{index}", allocated["current"], reserved["current"], allocated["peak"]))
    return tuple(found)
