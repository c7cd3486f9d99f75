"""Ray places servers on the nodes of a cluster. The cluster is a real one on this machine, with two nodes of two CPUs;
the servers are the small ones of the tests."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from tests.attempts.launchers.test_ray_train import RayCluster
from tests.support.fake_vllm_server import PROGRAM
from tests.support.processes import read_living
from tests.support.real_runs import wait_for
from tests.tasks.alike import assert_alike_weights
from tests.tasks.rollout.test_own_servers import engine_of
from tests.tasks.rollout.test_remote_engine import assert_alike, by_hand
from tests.tasks.rollout.test_vllm_engine import moved as moved_policy
from tests.tasks.rollout.test_vllm_engine import parts
from tests.tasks.test_servers_on_ranks import rows_of
from tests.tasks.test_stages_on_ranks import moved
from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.launchers import local_process
from vantage.attempts.launchers.launcher import StageFailed
from vantage.attempts.launchers.local_process import LocalProcess
from vantage.attempts.segments import read_segments
from vantage.schemas.kinds import resolve_work
from vantage.schemas.recipe.stage import Resources
from vantage.schemas.records.attempt import Share
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.rollout import own_servers, servers_on_nodes
from vantage.tasks.rollout.server_process import Program
from vantage.tasks.rollout.servers_on_nodes import Places
from vantage.tasks.rollout.vllm_server import EngineUnavailable
from vantage.tasks.training.scratch import read_committed

pytestmark = pytest.mark.slow

RUN = "tests.support.served_stages.run"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Yield two nodes of two CPUs: each has room for a rank and a server."""
    found = RayCluster()
    try:
        found.say("add 2")
        found.say("add 2")
        yield found
    finally:
        found.end()


@pytest.fixture
def driver(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    """Let this process ask Ray for the servers, as a rank does."""
    monkeypatch.setattr(own_servers, "PROGRAM", PROGRAM)
    monkeypatch.setattr(own_servers, "find_spec", lambda name: "there")
    monkeypatch.setattr(own_servers, "_by_ray", None)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    own_servers.close_own_servers()
    ray.shutdown()


def servers_of(scratch: Path) -> list[psutil.Process]:
    """Return the servers of a stage that run, on all nodes, without the processes that guard them."""
    lines = read_living(psutil.process_iter(), psutil.Process.cmdline)
    return [
        each
        for each, line in lines.items()
        if str(scratch / "servers") in line and "vantage.tasks.rollout.guarded_process" not in line
    ]


def nodes_of(servers: list[psutil.Process]) -> set[int]:
    """Return the processes of Ray that are the servers' nodes. A node names itself to all that it starts.

    Linux shows the environment of a new process a moment after its command line.
    """
    named = read_living(servers, lambda server: server.environ().get("RAY_RAYLET_PID"))
    return {int(node) for node in named.values() if node is not None}


def end_within(scratch: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while servers_of(scratch) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not servers_of(scratch)


def test_servers_are_spread_over_nodes_and_start_again_where_there_is_room(
    driver: RayCluster, pipeline: Any
) -> None:
    """One is killed, and then its whole node is lost. Each response is the one that it is without any server."""
    own_servers.place_by_ray(cpus=1, nodes=2)
    policy, codec, prompts = parts(pipeline)
    assert codec.scratch is not None
    engine = engine_of(policy, codec, 1)

    def samples(seed: int) -> list[psutil.Process]:
        """Sample until both servers run: one alone answers while the other starts."""
        deadline = time.monotonic() + 120.0
        while True:
            found = engine.generate(prompts, count=2, seed=seed)
            assert_alike(found, by_hand(policy, codec, prompts, count=2, seed=seed))
            running = servers_of(codec.scratch)  # type: ignore[arg-type]
            if len(running) == 2 or time.monotonic() > deadline:
                return running
            time.sleep(0.5)

    first = samples(1)
    nodes_of_first = nodes_of(first)
    assert len(first) == len(nodes_of_first) == 2, "one on each node"
    moved_policy(policy, 0.05)
    engine.take_weights(policy.causal_lm.named_parameters())
    first[0].kill()
    again = samples(2)
    assert nodes_of(again) == nodes_of_first
    assert first[1] in again and first[0] not in again

    nodes = driver.say("lose")
    try:
        wait_for(lambda: len(servers_of(codec.scratch)) == 1)  # type: ignore[arg-type]
        at_one = samples(3)
        assert len(at_one) == 2 and len(nodes_of(at_one)) == 1
    finally:
        if nodes == 1:
            driver.say("add 2")
    own_servers.close_own_servers()
    assert end_within(codec.scratch, 20)


def test_servers_without_a_place_or_a_folder_end_the_stage(
    driver: RayCluster, pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers_on_nodes, "PLACE_SECONDS", 3.0)
    own_servers.place_by_ray(cpus=3, nodes=1)
    policy, codec, prompts = parts(pipeline)
    with pytest.raises(
        EngineUnavailable, match=r"no place for server 0 .* within 3 s: no node has 3 CPU free for it"
    ):
        engine_of(policy, codec, 1).generate(prompts, count=1, seed=1)
    own_servers.close_own_servers()

    monkeypatch.setattr(servers_on_nodes, "PLACE_SECONDS", 60.0)
    program = Program(PROGRAM, tmp_path / "elsewhere" / "server-0.log", {}, {})
    places = Places(1, cpus=1, gpus=0)
    process = places.process(0, program)
    process.begin()
    with pytest.raises(
        ValueError, match=r"rollout\.servers: node .* does not see .*elsewhere; put the workspace"
    ):
        while process.url() is None:
            time.sleep(0.1)
    process.end()
    places.give_back()


def test_a_node_has_room_for_ranks_and_servers() -> None:
    """CPUs are shared out equally; a GPU is a rank's or a server's."""
    from vantage.attempts.launchers import ray_train

    gpus = Resources.model_validate({"nodes": 2, "gpus": 8, "cpus": 64})
    assert ray_train._nodes_asked(gpus, on_each=6, servers=2).bundle == {"CPU": 64, "GPU": 8}
    placed = ray_train._placement(gpus, nodes=2, num_ranks=12, servers=2)
    assert (placed.num_workers, placed.resources_per_worker) == (12, {"CPU": 8})
    cpus = Resources.model_validate({"nodes": {"least": 1, "most": 3}})
    assert ray_train._nodes_asked(cpus, on_each=1, servers=3).bundle == {"CPU": 4}
    assert ray_train._nodes_asked(cpus, on_each=1).bundle == {"CPU": 1}


def job_of(pipeline: Any, prompts: Path, folder: Path, kind: str, **changes: Any) -> StageJob:
    """Return a stage with servers of its own, which sample one response after the other."""
    found: StageJob = pipeline.job(kind, folder=folder, **changes)
    found = found.model_copy(update={"inputs": found.inputs | {"prompts": prompts}})
    work: Any = resolve_work(found.work)
    rollout = work.rollout.model_copy(update={"engine": "vllm", "servers": 1, "request_seconds": 30.0})
    return found.model_copy(update={"work": work.model_copy(update={"rollout": rollout}), "threads": 1})


def launch(job: StageJob, folder: Path, *, nodes: Any, attempt: int = 1, **options: Any) -> StageResult:
    resources = Resources.model_validate({"nodes": nodes})
    job = job.model_copy(
        update={"work": job.work.model_copy(update={"resources": resources}), "attempt": attempt}
    )
    return LocalProcess().launch(job, log=folder / "log.txt", share=Share(cpus=1), function=RUN, **options)


@pytest.fixture
def at_cluster(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    return cluster


def launch_until_killed(job: StageJob, folder: Path) -> None:
    """Launch the job on two nodes, and kill what drives it when both of its servers run; they end too."""
    killed = False

    def kill_the_driver() -> None:
        nonlocal killed
        if not killed and len(servers_of(job.scratch)) == 2:
            [driver] = local_process._stages
            os.kill(driver, signal.SIGKILL)
            killed = True

    with pytest.raises(StageFailed) as caught:
        launch(job, folder, nodes=2, on_poll=kill_the_driver)
    assert caught.value.failure.cause == "killed"
    assert end_within(job.scratch, 30)


@pytest.mark.timeout(600)
def test_two_nodes_collect_the_responses_that_one_machine_collects_even_after_their_driver_was_killed(
    at_cluster: RayCluster, pipeline: Any, few_prompts: Path, tmp_path: Path
) -> None:
    jobs = {
        name: job_of(pipeline, few_prompts, tmp_path / name, "collected") for name in ("alone", "together")
    }
    expected = launch(jobs["alone"], tmp_path / "alone", nodes=None)
    launch_until_killed(jobs["together"], tmp_path / "together")
    seen: set[int] = set()

    def look() -> None:
        seen.update(nodes_of(servers_of(jobs["together"].scratch)))

    result = launch(jobs["together"], tmp_path / "together", nodes=2, attempt=2, on_poll=look)
    assert len(seen) == 2
    assert end_within(jobs["together"].scratch, 20)
    rows, others = (rows_of(jobs[name]) for name in ("together", "alone"))
    assert [row["response_ids"] for row in rows] == [row["response_ids"] for row in others]
    assert result.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5)


@pytest.mark.timeout(900)
def test_a_stage_whose_node_is_lost_goes_on_from_its_checkpoint(
    at_cluster: RayCluster, pipeline: Any, few_prompts: Path, tmp_path: Path
) -> None:
    """The servers end with each attempt; the last attempt has one rank and one server, on the node that is left."""
    settings = {"iterations": 4, "checkpoint_every": 1, "validation_samples": 4}
    alone = job_of(pipeline, few_prompts, tmp_path / "alone", "policy", **settings)
    launch(alone, tmp_path / "alone", nodes=None)
    folder = tmp_path / "together"
    job = job_of(pipeline, few_prompts, folder, "policy", **settings)
    nodes = 2

    def lose_a_node() -> None:
        nonlocal nodes
        if nodes == 2 and read_committed(job.scratch)[0] >= 1:
            nodes = at_cluster.say("lose")

    try:
        with pytest.raises(StageFailed) as caught:
            launch(job, folder, nodes=2, on_poll=lose_a_node)
        assert nodes == 1
        assert caught.value.failure.exit_code == ExitCode.RESUME, caught.value.failure
        assert end_within(job.scratch, 30)
        launch(job, folder, nodes={"least": 1, "most": 2}, attempt=2)
    finally:
        if nodes == 1:
            at_cluster.say("add 2")
    assert [each.ranks for each in read_segments(job.scratch)] == [2, 1]
    assert end_within(job.scratch, 30)
    trained: Any = alone.work
    assert_alike_weights(moved(job), moved(alone), learning_rate=trained.learning_rate)
