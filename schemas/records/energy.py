"""The energy that the machine used while an attempt was computed, where it has counters."""

from vantage.schemas.frozen import Frozen


class Energy(Frozen):
    """What counters of the hardware counted from the start of an attempt's computation to its end."""

    gpu_joules: float | None = None
    """Of all GPUs of the attempt together (NVML); None: not measured, or it had none."""
    cpu_joules: float | None = None
    """Of all processor packages of the machine (RAPL), whatever else they computed meanwhile; None: not measured."""
