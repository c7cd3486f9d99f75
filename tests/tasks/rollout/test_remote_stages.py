"""Whole stages sample with servers of vLLM: every kind, killed and resumed stages, servers that die, and several ranks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_vllm_server import FakeServer, serving
from tests.tasks.alike import ADAM_EPS, assert_alike, assert_alike_weights, run_to_compare
from tests.tasks.kills import same_bytes_after_a_kill
from tests.tasks.rollout.test_engine import best_of_n_job
from tests.tasks.test_stages_on_ranks import moved, of_preset, result_of, start
from vantage.ledger.journal import read
from vantage.schemas.kinds import resolve_work
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.rollout import remote_engine
from vantage.tasks.rollout.remote_engine import EngineUnavailable
from vantage.tasks.stages import run_stage
from vantage.tasks.training.scratch import JOURNAL

pytestmark = pytest.mark.slow

Contents = Callable[[Path], dict[str, bytes]]


@pytest.fixture
def servers(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeServer]]:
    """Yield two servers of one model."""
    monkeypatch.setattr(remote_engine, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(remote_engine, "PATIENCE_SECONDS", 0.5)
    with serving(pipeline.folder("model"), replicas=2) as started:
        yield started


def served(job: StageJob, servers: list[FakeServer], **changes: Any) -> StageJob:
    """Return the job, sampling with these servers: short responses, and few to validate, since they answer one request after the other."""
    before: Any = job.work
    url = tuple(server.url for server in servers)
    rollout = before.rollout.model_copy(update={"engine": "vllm", "url": url})
    few = {"validation_samples": 4} if hasattr(before, "validation_samples") else {}
    work = before.model_copy(update={"rollout": rollout, **few, **changes})
    generation = job.generation.model_copy(update={"max_response_tokens": 12})
    return job.model_copy(update={"work": work, "generation": generation})


def metrics_of(job: StageJob) -> list[dict[str, float]]:
    return [entry.metrics for entry in read(job.scratch / JOURNAL)]


@pytest.mark.parametrize("kind", ["policy", "best_of_n", "collected", "evaluation", "value"])
def test_whole_stages_sample_with_servers(
    kind: str, pipeline: Any, few_prompts: Path, servers: list[FakeServer], tmp_path: Path
) -> None:
    """The trainer's log-probabilities are the servers', after every update; each rollout was sampled by the newest weights."""
    job = best_of_n_job(pipeline, tmp_path) if kind == "best_of_n" else pipeline.job(kind, folder=tmp_path)
    job = served(job, servers)
    job = job.model_copy(update={"inputs": job.inputs | {"prompts": few_prompts}})
    run_stage(job)
    assert all(server.seen.seeds for server in servers)
    assert not (job.scratch / "weights").exists()
    if kind != "evaluation":
        steps = range(len(metrics_of(job)))
        iterations = [0] * len(steps) if kind == "collected" else list(steps)
        assert [metrics["sampled_iteration"] for metrics in metrics_of(job)] == iterations
    if kind in ("policy", "best_of_n"):
        digests = [metrics["sampled_weights"] for metrics in metrics_of(job)]
        assert len(set(digests)) == len(digests) == job.work.iterations
        for server in servers:
            given = [version for version in server.seen.versions if version != "updating"]
            assert [int(version.split("-")[1], 16) for version in given[: len(digests)]] == digests


def test_a_killed_stage_gives_its_servers_the_checkpoints_weights(
    pipeline: Any,
    servers: list[FakeServer],
    tmp_path: Path,
    contents: Contents,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The servers hold the killed attempt's weights, which are newer than the checkpoint's."""

    def job_in(folder: Path) -> StageJob:
        return served(pipeline.job("policy", folder=folder, iterations=4, checkpoint_every=2), servers)

    same_bytes_after_a_kill(run_stage, job_in, tmp_path, step=3, contents=contents, monkeypatch=monkeypatch)


def test_a_stage_goes_on_when_its_servers_are_back(
    pipeline: Any, servers: list[FakeServer], tmp_path: Path, contents: Contents
) -> None:
    """One server dies, and the other takes over; then that one dies too, and the stage ends; both return without weights."""

    def job_in(folder: Path) -> StageJob:
        return served(pipeline.job("policy", folder=folder, iterations=4, checkpoint_every=1), servers)

    whole, cut = job_in(tmp_path / "whole"), job_in(tmp_path / "cut")
    expected = run_stage(whole)
    asked = [len(server.seen.seeds) for server in servers]
    servers[0].faults.stops_at, servers[1].faults.stops_at = asked[0] + 10, asked[1] + 30
    with pytest.raises(EngineUnavailable, match="no server of rollout.url could sample"):
        run_stage(cut)
    done = len(metrics_of(cut))
    assert 1 <= done < 4
    for server in servers:
        server.start()
        server.faults.stops_at = None
    assert run_stage(cut) == expected
    assert contents(cut.output) == contents(whole.output)
    steps = [entry.step for entry in read(cut.scratch / JOURNAL)]
    assert steps == [1, 2, 3, 4]
    whole_curves, cut_curves = (
        [
            {name: metrics[name] for name in ("sampled_weights", "sampled_iteration", "score_mean")}
            for metrics in metrics_of(job)
        ]
        for job in (whole, cut)
    )
    assert cut_curves == whole_curves
    assert sum(metrics["engine_failures"] for metrics in metrics_of(cut)) > 0


def policy_job(
    preset: str | None, ahead: int, pipeline: Any, servers: list[FakeServer], folder: Path
) -> StageJob[Any]:
    """Return a policy stage that samples with these servers, either of a preset or with ``ahead`` rollouts ahead."""
    if preset is not None:
        job = of_preset(preset, iterations=2)(pipeline, folder)
        generation = job.generation.model_copy(update={"temperature": 0.7})
        return served(job.model_copy(update={"generation": generation}), servers)
    job = pipeline.job("policy", folder=folder, iterations=3)
    job = served(job.model_copy(update={"work": resolve_work(job.work)}), servers)
    work: Any = job.work
    rollout = work.rollout.model_copy(update={"ahead": ahead})
    return job.model_copy(update={"work": work.model_copy(update={"rollout": rollout})})


def seeds_of(servers: list[FakeServer]) -> list[int]:
    """Return the seed of each response that the servers were asked for."""
    return [seed for server in servers for seed in server.seen.seeds]


@dataclass(frozen=True)
class Alone:
    """The result of a policy stage in one process, and the seeds of the responses that it asked for."""

    job: StageJob
    result: StageResult
    seeds: list[int]


@pytest.fixture(scope="module")
def by_one_process(
    pipeline: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str | None, int], Alone]:
    """Return a function of the arguments of ``policy_job`` that runs each of its stages once, with servers of its own."""

    @cache
    def run(preset: str | None, ahead: int) -> Alone:
        with serving(pipeline.folder("model"), replicas=2) as servers:
            job = policy_job(preset, ahead, pipeline, servers, tmp_path_factory.mktemp("alone"))
            result = run_to_compare(job)
            return Alone(job, result, seeds_of(servers))

    return run


@pytest.mark.parametrize(
    "strategy, preset, ahead",
    [
        ("ddp", None, 0),
        pytest.param("ddp", None, 1, id="ddp, and the next rollout meanwhile"),
        pytest.param("fsdp2", None, 0, id="fsdp2: each rank holds a half of every weight"),
        pytest.param("fsdp2", None, 1, id="fsdp2, and the next rollout meanwhile"),
        pytest.param("fsdp2", "remax", 0, id="fsdp2, and greedy responses, read at another temperature"),
    ],
)
def test_two_ranks_ask_for_their_own_responses(
    strategy: str,
    preset: str | None,
    ahead: int,
    pipeline: Any,
    by_one_process: Callable[[str | None, int], Alone],
    servers: list[FakeServer],
    tmp_path: Path,
) -> None:
    """Two ranks have the weights and metrics of one process, ask for each response once, and one rank gives weights."""
    alone = by_one_process(preset, ahead)
    together = policy_job(preset, ahead, pipeline, servers, tmp_path)
    start(2, tmp_path / "jobs", [together], eps=ADAM_EPS, strategy=strategy)
    seeds = seeds_of(servers)
    assert set(seeds) == set(alone.seeds) and len(seeds) == len(alone.seeds)
    assert_alike_weights(moved(together), moved(alone.job), learning_rate=together.work.learning_rate)
    results = [result_of(together, rank) for rank in range(2)]
    assert results[0].metrics == results[1].metrics
    assert_alike(results[0].metrics, alone.result.metrics, rel=2e-3, abs=2e-4)
    assert not (together.scratch / "weights").exists()
