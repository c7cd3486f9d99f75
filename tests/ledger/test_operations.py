"""Operations on their way through the outbox."""

from tests.ledger.told_operations import (
    FINISH_STAGE,
    OPEN_RUN,
    OPEN_STAGE,
    REUSE,
)
from vantage.ledger.operations import LogBill, LogMetrics, LogReport, from_json, to_json


def test_every_operation_survives_the_outbox() -> None:
    rows = (("loss", 0.25, 1000, 0), ("loss", float("inf"), 1001, 1))
    told = (
        LogMetrics(stage="sft", rows=rows),
        LogReport(time=5, file="/runs/1/report.html"),
        LogBill(time=6, stage="sft", file="/runs/1/bills/sft.cdx.json"),
    )
    for operation in (OPEN_RUN, OPEN_STAGE, FINISH_STAGE, REUSE, *told):
        assert from_json(to_json(operation)) == operation
