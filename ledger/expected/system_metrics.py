"""MLflow's system metrics: readings of the machine during an attempt."""

from collections.abc import Iterator

from vantage.ledger.operations import MetricRow
from vantage.schemas.records.usage import Usage

SYSTEM_METRICS = "system/"
"""Prefix of the names of metrics that MLflow shows under "System metrics"."""


def system_rows(usage: Usage | None, *, first: int = 0) -> Iterator[MetricRow]:
    """Yield a row for each reading; its step is the reading's number, counted from ``first``."""
    if usage is None:
        return
    for name, values in usage.readings.items():
        for step, (time, value) in enumerate(zip(usage.times, values, strict=True), first):
            if value is not None:
                yield f"{SYSTEM_METRICS}{name}", value, time, step
