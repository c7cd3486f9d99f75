"""Every kind of stage and every preset on two or three gloo processes against one process: weights, metrics, rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from schemas.kinds import resolve_work
from schemas.records.job import StageJob
from tests.tasks import test_presets_run

SECONDS = 300
TOLERANCE = 0.02
"""Of the largest change of any weight by training: how far weights of several processes may be from those of one.

Sums over rows are rounded in another order. AdamW divides a gradient by its own size, so a weight whose gradient is
nearly 0 may move the other way."""
ROOT = Path(__file__).parents[2]

Job = Callable[[Any, Path], StageJob]
"""From the small pipeline and a folder to the job."""


def of_kind(name: str, **changes: Any) -> Job:
    def job(pipeline: Any, folder: Path) -> StageJob:
        found: StageJob = pipeline.job(name, folder=folder, **changes)
        return found.model_copy(update={"work": resolve_work(found.work)})

    return job


def of_preset(name: str) -> Job:
    def job(pipeline: Any, folder: Path) -> StageJob:
        return test_presets_run.job_of(test_presets_run.CASES[name], pipeline, folder)

    return job


KINDS: dict[str, Job] = {
    # 16 and 8 rows do not divide by 3; micro-batches of 3 give ranks unequal numbers of passes
    "sft": of_kind("sft", microbatch_size=3),
    "reward": of_kind("reward", microbatch_size=2),
    "value": of_kind("value", microbatch_size=3),
    "policy": of_kind("policy", microbatch_size=3),
    "evaluation": of_kind("evaluation"),
}
PRESETS = {name: of_preset(name) for name in test_presets_run.CASES}
