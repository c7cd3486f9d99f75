"""Compute fake stages that leave all that a page shows: models, curves, uncertain numbers and responses.

A child process runs this module by name.
"""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.review.audit import audited_work
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.records.uncertainty import Uncertainty

ROWS = 40


def run_stage(job: StageJob) -> StageResult:
    """Do as ``audited_work`` does; an evaluation has responses and a standard error, data has rows that were left out."""
    result = audited_work.run_stage(job)
    if job.work.kind == "evaluation":
        for role, response, judgement in (("baseline", "3", 0.0), ("candidate", "2", 1.0)):
            rows = [
                {"prompt": f"{number}+1?", "response": response, "ended": True, "judgement": judgement}
                for number in range(ROWS)
            ]
            pq.write_table(pa.Table.from_pylist(rows), Path(job.output, f"{role}.parquet"))
        # 40 of 400 answers differ, and all of these were gained: the error is √((0.1 − 0.1²)/400)
        known = Uncertainty(n=400, rows=400, standard_error=0.015, differing=0.1)
        return result.model_copy(update={"uncertainty": {"accuracy_gain": known}})
    if job.name == "data.demonstrations":
        lost = {"source_rows": 100.0, "dropped_rows": 5.0, "repeated_rows": 0.0}
        return result.model_copy(update={"metrics": {**result.metrics, **lost}})
    return result
