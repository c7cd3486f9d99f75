"""NVIDIA's library for counters of GPUs, as ``pynvml`` offers it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def initialised(nvml: ModuleType | None) -> Iterator[ModuleType]:
    """The library with a connection to the driver; None: the installed one. An exception of its own where there is no driver."""
    if nvml is None:
        import pynvml as nvml
    nvml.nvmlInit()
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def handle_of(nvml: ModuleType, gpu: str) -> Any:
    """A GPU as CUDA_VISIBLE_DEVICES names it: by number or UUID."""
    if gpu.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(gpu))
    return nvml.nvmlDeviceGetHandleByUUID(gpu)
