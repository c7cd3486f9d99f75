"""NVIDIA's library for counters of GPUs, as ``pynvml`` offers it."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any


@contextmanager
def initialised(nvml: ModuleType | None) -> Iterator[ModuleType]:
    """Yield the library with a connection to the driver; None: the installed library. Without a driver, the library's
    error is raised."""
    library = import_module("pynvml") if nvml is None else nvml
    library.nvmlInit()
    try:
        yield library
    finally:
        library.nvmlShutdown()


def handle_of(nvml: ModuleType, gpu: str) -> Any:
    """Return a GPU by its name in CUDA_VISIBLE_DEVICES, a number or a UUID."""
    if gpu.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(gpu))
    return nvml.nvmlDeviceGetHandleByUUID(gpu)
