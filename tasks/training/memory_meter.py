"""How much memory a device has for this process, and how much of it was taken."""

from typing import Protocol

import torch

from vantage.tasks.training import ranks


class Meter(Protocol):
    """A device's memory, in bytes."""

    @property
    def device(self) -> str:
        """Return its name and how many processes share the work: what was found on another one holds no longer."""

    def begin(self) -> None:
        """Forget the peak."""

    def peak(self) -> int:
        """Return the most that was taken at once since ``begin``."""

    def taken(self) -> int:
        """Return what is taken now."""

    def limit(self) -> int:
        """Return the most that this process may take."""


class CudaMeter:
    """The GPU of this rank, as PyTorch's allocator counts it."""

    @property
    def device(self) -> str:
        """Name and memory; several ranks are told apart from one."""
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return f"{properties.name}, {properties.total_memory} bytes, {ranks.world_size()} ranks"

    def begin(self) -> None:
        """Forget the peak, and give cached blocks back: they fit the passes before."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Return the most bytes that tensors have taken."""
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def taken(self) -> int:
        """Return the bytes that tensors take."""
        return torch.cuda.memory_allocated()

    def limit(self) -> int:
        """Return what is free on the GPU, and what this process has of it; less where others compute there too."""
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved()


def meter() -> Meter | None:
    """Return the meter of the device that this process computes on; None on a CPU.

    What a process takes there is known by pages, with the allocator's own caches: two equal runs would find unequal limits
    and end with unequal bits.
    """
    return CudaMeter() if torch.cuda.is_available() else None
