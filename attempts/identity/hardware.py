"""Describe the machine: processor, memory, GPUs and their driver; read from the kernel's files, without a library."""

import os
import platform
import re
from collections import Counter
from pathlib import Path

from vantage.attempts.machine import available_cpus
from vantage.tasks.training.control_groups import PROC, memory_limit

UNKNOWN = "unknown"
_GIB = 2**30


def hardware(proc: Path = PROC) -> dict[str, str]:
    """Return ``cpu`` (the model), ``cpus`` (number for this process), ``memory``, ``gpus`` and their ``driver``."""
    driver = proc / "driver" / "nvidia"
    gpus = Counter(
        _found(r"^Model:\s*(.+)$", information) for information in sorted(driver.glob("gpus/*/information"))
    )
    return {
        "cpu": _found(r"^(?:model name|Model|Processor)\s*:\s*(.+)$", proc / "cpuinfo", or_else=_processor()),
        "cpus": str(available_cpus()),
        "memory": _memory(proc / "meminfo", memory_limit(proc)),
        "gpus": ", ".join(f"{count} × {model}" for model, count in sorted(gpus.items())) or "none",
        "driver": _found(r"Kernel Module(?: for \S+)?\s+(\d[\d.]*)", driver / "version", or_else="none"),
    }


def _processor() -> str:
    return platform.machine() or UNKNOWN


def _memory(meminfo: Path, allowed: int | None) -> str:
    """Return the memory, as ``7.8 GiB``: that of the machine, or of the container if it may use less."""
    total = _found(r"^MemTotal:\s*(\d+) kB$", meminfo)
    bounds = [int(total) * 1024] if total.isdecimal() else []
    bounds += [] if allowed is None else [allowed]
    return f"{min(bounds) / _GIB:.1f} GiB" if bounds else UNKNOWN


def _found(pattern: str, path: Path, *, or_else: str = UNKNOWN) -> str:
    """Return the first group of the first match in a file."""
    try:
        match = re.search(pattern, path.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return or_else
    return " ".join(match[1].split()) if match else or_else


def container_image(containerenv: Path = Path("/run/.containerenv")) -> str:
    """Return the image that this process runs in, from ``VANTAGE_IMAGE`` or podman; ``unknown`` otherwise."""
    image = os.environ.get("VANTAGE_IMAGE", "").strip()
    if image:
        return image
    return _found(r'^image="(.+)"$', containerenv)
