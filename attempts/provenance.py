"""Record the provenance of a stage's result: code, library versions, device. Differences are shown as drift; no key
contains it.

Nothing here imports the code: versions come from the installed metadata.
"""

import os
import platform
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vantage.attempts.code_digest import code_digest
from vantage.schemas.kinds import KINDS

NVIDIA = Path("/proc/driver/nvidia")
GRAPHS = "VANTAGE_CUDA_GRAPHS"
"""Environment variable; 0: the sampler captures no steps as CUDA graphs, which rounds its responses differently."""

LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow", "numpy")


def provenance(kind: str, *, threads: int, world_size: int) -> dict[str, str]:
    """Return the provenance of a kind of work on this machine: code, library versions, device, torch's threads,
    processes."""
    return {
        "code": code_digest(KINDS[kind].module),
        "python": platform.python_version(),
        **{name: _version(name) for name in LIBRARIES},
        "device": _device(),
        "threads": str(threads),
        "world_size": str(world_size),
    }


def drift(recorded: Mapping[str, object], present: Mapping[str, str]) -> list[str]:
    """Return ``part: old → new`` for each difference; digests are shortened."""
    return [
        f"{part}: {_short(str(recorded.get(part, 'unknown')))} → {_short(value)}"
        for part, value in present.items()
        if recorded.get(part) != value
    ]


def _device() -> str:
    """Return the name of the first GPU from its driver, and whether it may replay CUDA graphs (docs/decisions/0037), or
    ``cpu``. They are read from /proc, so that no library is loaded."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return "cpu"
    for information in sorted(NVIDIA.glob("gpus/*/information")):
        if model := re.search(r"^Model:\s*(.+)$", information.read_text(), re.MULTILINE):
            return model[1].strip() + (" without CUDA graphs" if os.environ.get(GRAPHS) == "0" else "")
    return "cpu"


@cache
def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"


def _short(value: str) -> str:
    return value[:12] if re.fullmatch(r"[0-9a-f]{64}", value) else value
