"""Readings of the machine while an attempt was computed, taken from time to time."""

from vantage.schemas.frozen import Frozen


class Usage(Frozen):
    """Readings of the whole machine, including other work."""

    times: tuple[int, ...]
    """Time of each reading, in milliseconds since 1970 by the machine's clock."""
    readings: dict[str, tuple[float | None, ...]]
    """MLflow's name of the reading (``cpu_utilization_percentage``) → its value at each time; None: it could not be read."""
