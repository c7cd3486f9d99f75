"""Run `vantage` with fake stages whose evaluation measures something of its own for every arm and seed."""

import time
from pathlib import Path

from tests.support.fake_work import WEIGHTS, workspace_of
from tests.support.fake_work import run_stage as run_fake
from tests.support.faked_stages import compute_with
from vantage.schemas.recipe.stages import PolicyOptimization
from vantage.schemas.records.job import StageJob, StageResult

compute_with("tests.support.fake_sweep.run_stage")


def run_stage(job: StageJob) -> StageResult:
    """Do a fake stage; an evaluation's accuracy is a function of the candidate's weights alone."""
    if job.work.kind == "policy_optimization" and (workspace_of(job) / "meet.txt").exists():
        meet(workspace_of(job) / "meet.txt")
    if isinstance(job.work, PolicyOptimization) and job.work.iterations == 13:
        raise ValueError("13 iterations bring bad luck; use 12")
    result = run_fake(job)
    if job.work.kind != "evaluation":
        return result
    weights = (job.inputs["candidate"] / WEIGHTS).read_text()
    return result.model_copy(update={"metrics": {**result.metrics, "accuracy": int(weights[:6], 16) / 16**6}})


def meet(place: Path) -> None:
    """Come to where stages meet, and wait until two have come."""
    with place.open("a") as file:
        file.write("here\n")
    give_up = time.monotonic() + 60
    while len(place.read_text().splitlines()) < 2:
        if time.monotonic() > give_up:
            raise TimeoutError("no other policy is trained at the same time")
        time.sleep(0.02)


if __name__ == "__main__":
    from vantage.cli.main import main

    main()
