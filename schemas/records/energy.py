"""The energy that the machine used while an attempt was computed, where it has counters."""

from vantage.schemas.frozen import Frozen


class Energy(Frozen):
    """Energy by the hardware's counters, from the start of an attempt's computation to its end."""

    gpu_joules: float | None = None
    """Energy of all GPUs of the attempt together (NVML); None: not measured, or it had no GPU."""
    cpu_joules: float | None = None
    """Energy of all processor packages of the machine (RAPL), including other work; None: not measured."""
