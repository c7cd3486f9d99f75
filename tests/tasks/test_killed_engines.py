"""A policy stage whose vLLM is killed at random moments ends with the weights of an undisturbed one."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fork_server import WITH_TORCH
from tests.support.killed_engines import KILLED, KILLS
from tests.tasks.test_stages_on_ranks import moved
from vantage.attempts.launchers.launcher import StageFailed
from vantage.attempts.launchers.local_process import LocalProcess
from vantage.ledger.journal import read
from vantage.schemas.metric_names import OF_MACHINE
from vantage.schemas.records.attempt import Share
from vantage.schemas.records.job import StageJob
from vantage.tasks.training.scratch import JOURNAL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PHASES = ("sampling", "updating", "asleep")
SEEDS = (1,)
"""Seeds that draw the moments."""


def job_of(pipeline: Any, folder: Path, *, name: str = "policy", **rollout: Any) -> StageJob:
    changes = {"iterations": 4, "checkpoint_every": 1, "validate_every": 1 if rollout.get("ahead") else 2}
    job: StageJob = pipeline.job(name, folder=folder, **changes)
    sampling = job.work.rollout.model_copy(update={"engine": "vllm", **rollout})
    return job.model_copy(update={"work": job.work.model_copy(update={"rollout": sampling}), "threads": 1})


def launch(job: StageJob, folder: Path, function: str, attempt: int = 1) -> None:
    LocalProcess().launch(
        job.model_copy(update={"attempt": attempt}),
        log=folder / "log.txt",
        share=Share(cpus=1),
        function=f"tests.support.killed_engines.{function}",
    )


def moment(drawn: random.Random, phase: str, *, most: int) -> dict[str, Any]:
    return {"phase": phase, "at": drawn.randint(1, most), "after": drawn.choice((0.0, drawn.random() / 10))}


def assert_the_same(job: StageJob, expected: StageJob) -> None:
    """Assert that both are equal bit by bit, with one record of each step."""
    found, whole = moved(job), moved(expected)
    assert found.keys() == whole.keys() and len(whole) > 0
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert metrics_of(job) == metrics_of(expected)


def metrics_of(job: StageJob) -> dict[int, dict[str, float]]:
    """Return each step's metrics, without times and what kills add."""
    left_out = {*OF_MACHINE, "engine_failures", "stale_responses"}
    return {
        entry.step: {name: each for name, each in entry.metrics.items() if name not in left_out}
        for entry in read(job.scratch / JOURNAL)
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stage_that_is_killed_with_its_vllm_goes_on(seed: int, pipeline: Any, tmp_path: Path) -> None:
    """The stage is killed once in each phase, at a random moment of it."""
    whole = job_of(pipeline, tmp_path / "whole")
    launch(whole, tmp_path / "whole", "run_in_process")

    drawn = random.Random(seed)
    folder = tmp_path / "killed"
    job = job_of(pipeline, folder)
    phases = drawn.sample(PHASES, len(PHASES))
    most = {"sampling": 60, "updating": 60, "asleep": 1}
    for attempt, phase in enumerate(phases, start=1):
        (job.scratch / KILLS).write_text(json.dumps([moment(drawn, phase, most=most[phase])]))
        with pytest.raises(StageFailed) as failed:
            launch(job, folder, "run_in_process", attempt)
        assert failed.value.failure.cause == "killed"
    (job.scratch / KILLS).unlink()
    launch(job, folder, "run_in_process", len(phases) + 1)
    assert (job.scratch / KILLED).read_text().split() == phases
    assert_the_same(job, whole)


@pytest.mark.parametrize("seed", SEEDS)
def test_servers_that_are_killed_are_started_again(seed: int, pipeline: Any, tmp_path: Path) -> None:
    """One of two servers is killed each time; the stage itself goes on."""
    WITH_TORCH.listen()
    whole = job_of(pipeline, tmp_path / "whole", servers=2, request_seconds=30.0)
    launch(whole, tmp_path / "whole", "run_with_servers")

    drawn = random.Random(seed)
    folder = tmp_path / "killed"
    job = job_of(pipeline, folder, servers=2, request_seconds=30.0)
    most = {"sampling": 40, "updating": 6, "asleep": 4}
    kills = [moment(drawn, phase, most=most[phase]) for phase in PHASES]
    (job.scratch / KILLS).write_text(json.dumps(kills))
    launch(job, folder, "run_with_servers")
    assert sorted((job.scratch / KILLED).read_text().split()) == sorted(each["phase"] for each in kills)
    assert_the_same(job, whole)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["policy", "value"])
def test_the_only_server_is_killed_while_it_samples_ahead(
    name: str, seed: int, pipeline: Any, tmp_path: Path
) -> None:
    """It is started again in this attempt, and given the weights from which it sampled; no attempt is lost."""
    WITH_TORCH.listen()
    ahead = {"name": name, "servers": 1, "ahead": 1, "request_seconds": 30.0}
    whole = job_of(pipeline, tmp_path / "whole", **ahead)
    launch(whole, tmp_path / "whole", "run_with_servers")

    drawn = random.Random(seed)
    folder = tmp_path / "killed"
    job = job_of(pipeline, folder, **ahead)
    kills = [
        {**moment(drawn, "sampling", most=40), "at": at} for at in sorted(drawn.sample(range(40, 90), 3))
    ]
    (job.scratch / KILLS).write_text(json.dumps(kills))
    launch(job, folder, "run_with_servers")
    assert (job.scratch / KILLED).read_text().split() == ["sampling"] * len(kills)
    assert_the_same(job, whole)
