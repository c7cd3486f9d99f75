"""What the machine did while an attempt was computed, read from time to time."""

from vantage.schemas.frozen import Frozen


class Usage(Frozen):
    """Readings of the whole machine, whatever else it computed meanwhile."""

    times: tuple[int, ...]
    """Of each reading, milliseconds since 1970 by the machine's clock."""
    readings: dict[str, tuple[float | None, ...]]
    """Name as MLflow has it (``cpu_utilization_percentage``) → its value at each time; None: it could not be read."""
