"""Read processor, memory and GPUs while an attempt is computed: MLflow's system metrics.

Stages know no MLflow, so the process that watches them reads the machine, and the ledger sends the readings when the
attempt ends. The number of readings is bounded, so those of a long attempt are farther apart.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

import psutil

from vantage.attempts.nvml import handle_of, initialised
from vantage.schemas.records.usage import Usage

EVERY_SECONDS = 10.0
"""Seconds between two readings, MLflow's default, until there are too many readings."""
MOST = 120
"""Most readings; beyond this number every second one is dropped, and later ones are twice as far apart."""
_MB = 1e6


class UsageMeter:
    """Reads the machine at some polls, and at the end."""

    def __init__(
        self,
        gpus: Sequence[str] = (),
        *,
        nvml: ModuleType | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            gpus: the GPUs of the attempt, as CUDA_VISIBLE_DEVICES names them.
            nvml: the module ``pynvml``; None: the installed one.
            clock: monotonic seconds.
        """
        self._gpus, self._nvml, self._clock = tuple(gpus), nvml, clock
        self._every = EVERY_SECONDS
        self._next = clock() + self._every
        self._cpu = _cpu_seconds()
        self._times: list[int] = []
        self._readings: list[dict[str, float]] = []

    def poll(self) -> None:
        """Read the machine if it is time for a reading."""
        if self._clock() >= self._next:
            self._read()
            if len(self._times) >= MOST:
                self._times, self._readings = self._times[1::2], self._readings[1::2]
                self._every *= 2
            self._next = self._clock() + self._every

    def finish(self) -> Usage:
        """Return all readings, with a last one from now."""
        self._read()
        names = sorted({name for each in self._readings for name in each})
        return Usage(
            times=tuple(self._times),
            readings={name: tuple(each.get(name) for each in self._readings) for name in names},
        )

    def _read(self) -> None:
        memory, before = psutil.virtual_memory(), self._cpu
        self._cpu = _cpu_seconds()
        busy, whole = (now - then for now, then in zip(self._cpu, before, strict=True))
        found = {
            "system_memory_usage_megabytes": memory.used / _MB,
            "system_memory_usage_percentage": memory.percent,
        }
        if whole > 0:  # the kernel counts in hundredths of a second
            found["cpu_utilization_percentage"] = min(100.0 * busy / whole, 100.0)
        self._times.append(time.time_ns() // 1_000_000)
        self._readings.append({name: round(value, 1) for name, value in (found | self._of_gpus()).items()})

    def _of_gpus(self) -> dict[str, float]:
        """Read the counters of each GPU; empty without a driver, and for partitions of a GPU."""
        found: dict[str, float] = {}
        if not self._gpus:
            return found
        with suppress(Exception), initialised(self._nvml) as nvml:
            for number, gpu in enumerate(self._gpus):
                with suppress(Exception):
                    found |= _of_gpu(nvml, handle_of(nvml, gpu), f"gpu_{number}")
        return found


def _cpu_seconds() -> tuple[float, float]:
    """Return the seconds of all processors since the machine's start: busy seconds, and all seconds."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # the time of guests is already part of user time
    whole = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return whole - idle, whole


def _of_gpu(nvml: ModuleType, handle: Any, name: str) -> dict[str, float]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return {
        f"{name}_memory_usage_megabytes": memory.used / _MB,
        f"{name}_memory_usage_percentage": 100.0 * memory.used / memory.total,
        f"{name}_utilization_percentage": nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        f"{name}_power_usage_watts": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
    }
