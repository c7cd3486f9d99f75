"""Measure how much memory a device has for this process, and how much of it was used."""

from typing import Protocol

import torch

from vantage.tasks.training import ranks


class Meter(Protocol):
    """A device's memory, in bytes."""

    @property
    def device(self) -> str:
        """Return the device's name and the number of processes that share the work; limits found on another device do not apply."""

    def begin(self) -> None:
        """Reset the peak."""

    def peak(self) -> int:
        """Return the most memory that was used at one time since ``begin``."""

    def taken(self) -> int:
        """Return the memory that is used now."""

    def limit(self) -> int:
        """Return the most memory that this process may use."""


class CudaMeter:
    """The GPU of this rank, as PyTorch's allocator counts it."""

    @property
    def device(self) -> str:
        """Name and memory; the text differs for several ranks and for one."""
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return f"{properties.name}, {properties.total_memory} bytes, {ranks.world_size()} ranks"

    def begin(self) -> None:
        """Reset the peak, and return cached blocks, whose sizes fit earlier passes."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Return the most bytes that tensors have used."""
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def taken(self) -> int:
        """Return the bytes that tensors use."""
        return torch.cuda.memory_allocated()

    def limit(self) -> int:
        """Return the GPU's free memory plus this process's own; it is less if other processes use the GPU too."""
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved()


def meter() -> Meter | None:
    """Return the meter of this process's device; None on a CPU.

    On a CPU, memory is measured in pages, with the allocator's own caches. Two equal runs would find different limits and end
    with different bits.
    """
    return CudaMeter() if torch.cuda.is_available() else None
