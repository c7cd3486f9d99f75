"""What the device at hand can do: by its data sheet, by a short measurement, or as the command line says."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu.floor import Rates
from vantage.estimates.devices import GPUS, Device

NAMES = {
    "H200": "h200",
    "H100": "h100",
    "A100": "a100",
    "L40S": "l40s",
    "RTX 4090": "4090",
}
"""What a device's own name contains → its name in ``vantage.estimates.devices``, whose rates are those of the makers' data sheets
(dense bfloat16). H100 PCIe and NVL are slower than the SXM that is meant there; measured rates tell."""
WIDTH = {"cuda": 8192, "cpu": 512}
"""Width of the square matrices whose product is timed."""
COPIED = {"cuda": 1 << 30, "cpu": 1 << 24}
"""Bytes that are copied."""
REPEATS = 5


@dataclass(frozen=True)
class Facts:
    """Name, memory and speeds of a device."""

    name: str
    memory: float
    """Bytes of its memory."""
    peak: Rates | None
    """Speeds by the data sheet; None: the device is not in the table."""
    measured: Rates
    """Speeds measured by a large product and a copy."""


def data_sheet(name: str) -> Device | None:
    """Return the entry of the device that calls itself so."""
    return next((GPUS[key] for part, key in NAMES.items() if part in name), None)


def facts(device: torch.device) -> Facts:
    """Measure the device at hand, for a second or two."""
    measured = Rates(product_rate(device), copy_rate(device))
    if device.type != "cuda":
        return Facts("CPU", memory=8e9, peak=None, measured=measured)
    properties = torch.cuda.get_device_properties(device)
    sheet = data_sheet(properties.name)
    return Facts(
        name=properties.name,
        memory=float(properties.total_memory),
        peak=None if sheet is None else Rates(sheet.bfloat16, sheet.bandwidth),
        measured=measured,
    )


def product_rate(device: torch.device) -> float:
    """Return the best FLOP/s of a few products of square matrices, in bfloat16 on a GPU and in float32 on a CPU."""
    width = WIDTH[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * width**3 / _quickest(lambda: left @ right, device)


def copy_rate(device: torch.device) -> float:
    """Return the best bytes/s that a few copies read and write."""
    source = torch.zeros(COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.numel() / _quickest(lambda: target.copy_(source), device)


def _quickest(work: Callable[[], object], device: torch.device) -> float:
    work()
    seconds = []
    for _ in range(REPEATS):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
