"""Seconds, memory and waits of the parts of an iteration."""

import resource
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

WAITS = "called a synchronizing CUDA operation"
"""What torch says where Python waits for a GPU."""


@dataclass(frozen=True)
class Timed:
    """A part of an iteration, over those that were measured."""

    seconds: float
    """Median seconds of an iteration."""
    lowest: float
    highest: float
    peak_memory: float
    """Bytes, at most: of tensors on a GPU; of the whole process on a CPU."""
    waits: int | None = None
    """Number of times that Python waited for the GPU in one more iteration; None on a CPU."""


def time_parts(
    parts: Mapping[str, Callable[[], None]],
    device: torch.device,
    *,
    warmup: int,
    measured: int,
    with_waits: bool = True,
) -> dict[str, Timed]:
    """Time all parts in their order: some iterations to warm up, some that count, and on a GPU one whose waits are
    counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    memory = dict.fromkeys(parts, 0.0)
    for iteration in range(warmup + measured):
        for name, part in parts.items():
            taken, peak = _time(part, device)
            if iteration >= warmup:
                seconds[name].append(taken)
                memory[name] = max(memory[name], peak)
    counts_waits = with_waits and device.type == "cuda"
    waits = {name: count_waits(part) for name, part in parts.items()} if counts_waits else {}
    return {
        name: Timed(
            seconds=statistics.median(found),
            lowest=min(found),
            highest=max(found),
            peak_memory=memory[name],
            waits=waits.get(name),
        )
        for name, found in seconds.items()
    }


def _time(part: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Return the seconds, by the GPU's own clock where there is one, and the peak memory."""
    if device.type != "cuda":
        start = time.perf_counter()
        part()
        return time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    torch.cuda.reset_peak_memory_stats(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    part()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000, float(torch.cuda.max_memory_allocated(device))


def count_waits(part: Callable[[], None]) -> int:
    """Return how often Python waits for the GPU in a part."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            part()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum(WAITS in str(each.message) for each in said)
