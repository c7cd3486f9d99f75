"""Operations survive the outbox, and their times have a date that can be read."""

from datetime import UTC, datetime

import pytest

from tests.ledger.told_operations import (
    FINISH_STAGE,
    OPEN_RUN,
    OPEN_STAGE,
    REUSE,
)
from vantage.ledger.operations import LogBill, LogMetrics, LogReport, from_json, to_json
from vantage.schemas.records.milliseconds import LATEST


def test_every_operation_survives_the_outbox() -> None:
    rows = (("loss", 0.25, 1000, 0), ("loss", float("inf"), 1001, 1))
    told = (
        LogMetrics(stage="sft", rows=rows),
        LogReport(time=5, file="/runs/1/report.html"),
        LogBill(time=6, stage="sft", file="/runs/1/bills/sft.cdx.json"),
    )
    for operation in (OPEN_RUN, OPEN_STAGE, FINISH_STAGE, REUSE, *told):
        assert from_json(to_json(operation)) == operation


@pytest.mark.parametrize("time", [LATEST + 1, -(10**15), 10**19, 10**30])
def test_a_time_without_a_date_is_refused(time: int) -> None:
    """Reports show dates of operations. Python has none of such a time."""
    with pytest.raises((ValueError, OverflowError)):
        datetime.fromtimestamp(time / 1000, UTC)
    for told in (
        {"operation": "log_report", "file": "a"},
        {"operation": "finish_run", "outcome": "completed", "reason": None},
    ):
        with pytest.raises(ValueError, match=r"time\n.*(less|greater) than or equal to"):
            from_json({**told, "time": time})


def test_the_first_and_the_last_date_are_read() -> None:
    for moment in (
        datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC),
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(1969, 1, 1, tzinfo=UTC),
    ):
        told = LogReport(time=round(moment.timestamp() * 1000), file="a")
        assert datetime.fromtimestamp(told.time / 1000, UTC) == moment
