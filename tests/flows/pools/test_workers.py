"""Stages run on workers of a pool, which share nothing with the run but a bucket and a Prefect server; only stages are fake."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.fixtures import RECIPE
from tests.support.orchestrated import attempt_all, orchestrated
from tests.support.pool_workers import (
    ON_POOL,
    Worker,
    computations,
    in_a_process,
    is_under_way,
    kill_all,
    soon,
    start_pipeline,
)
from tests.support.real_runs import run_recipe, wait_for
from vantage.flows.cancelling import attempts_under_way, cancel_run
from vantage.flows.open_runs import orchestrator_of
from vantage.runs.run import is_active, read_run, read_runs
from vantage.runs.status import run_state
from vantage.runs.workspace import Workspace

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory, ledger_database: str) -> dict[str, str | None]:
    """Return what one process makes of the recipe."""
    folder = tmp_path_factory.mktemp("one-process")
    recipe = folder / "fake.yaml"
    recipe.write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MLFLOW_TRACKING_URI", ledger_database)
        with orchestrated(Workspace(folder / "workspace"), recipe) as orchestrator:
            return {step: stage.digest for step, stage in attempt_all(orchestrator).items()}


def test_a_stage_on_a_worker_is_made_once_for_two_runs_and_is_what_one_process_makes(
    here: Workspace, worker: Worker, recipe_file: Path, tmp_path: Path, digests: dict[str, str | None]
) -> None:
    worker()
    with ThreadPoolExecutor(1) as other:
        first = other.submit(in_a_process, here, recipe_file)
        soon(lambda: computations(tmp_path) == ["started"], first)
        run_recipe(here, recipe_file, ON_POOL, "stages.evaluation.resources.cpus=1")
        assert first.result() == 0
    assert computations(tmp_path) == ["started", "finished"]
    for record in read_runs(here):
        assert record.status == "completed"
        assert {step: stage.digest for step, stage in record.stages.items()} == digests


def test_a_killed_pipeline_adopts_the_stage_that_goes_on_without_it(
    here: Workspace, worker: Worker, recipe_file: Path, tmp_path: Path, digests: dict[str, str | None]
) -> None:
    worker()
    pipeline = start_pipeline(here, recipe_file)
    soon(lambda: is_under_way(tmp_path))
    os.killpg(pipeline.pid, signal.SIGKILL)
    pipeline.communicate()
    record, _ = run_recipe(here, recipe_file, ON_POOL)
    assert record.run_id == read_runs(here)[0].run_id
    assert len(read_runs(here)) == 1
    assert record.status == "completed"
    assert {step: stage.digest for step, stage in record.stages.items()} == digests
    assert computations(tmp_path) == ["started", "finished"]
    assert record.stages["sft"].attempt == 1


def test_a_pipeline_whose_own_worker_ends_leaves_the_stage_and_adopts_it_later(
    here: Workspace, worker: Worker, recipe_file: Path, tmp_path: Path, digests: dict[str, str | None]
) -> None:
    worker(1.0)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run_recipe, here, recipe_file, ON_POOL)
        soon(lambda: is_under_way(tmp_path), running)
        [begun] = read_runs(here)
        orchestrator = orchestrator_of(begun.run_id)
        assert orchestrator is not None
        orchestrator.drain()
        record, _ = running.result()
    assert (record.status, record.stages["sft"].status) == ("resumable", "resumable")
    record, _ = run_recipe(here, recipe_file, ON_POOL)
    assert (record.run_id, record.status) == (begun.run_id, "completed")
    assert {step: stage.digest for step, stage in record.stages.items()} == digests
    assert computations(tmp_path) == ["started", "finished"]
    assert record.stages["sft"].attempt == 1


def test_a_killed_attempt_and_then_a_lost_machine_go_on_from_the_last_checkpoint(
    here: Workspace, worker: Worker, recipe_file: Path, tmp_path: Path, digests: dict[str, str | None]
) -> None:
    first = worker()
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run_recipe, here, recipe_file, ON_POOL)
        soon(lambda: is_under_way(tmp_path), running)
        for each in psutil.Process(first.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        soon(lambda: computations(tmp_path) == ["started", "started"], running)
        kill_all(first)
        worker()
        record, printed = running.result()
    assert "was lost" in printed
    assert record.status == "completed", printed
    assert {step: stage.digest for step, stage in record.stages.items()} == digests
    assert record.stages["sft"].attempt == 3
    assert computations(tmp_path).count("finished") == 1


def test_a_cancelled_run_is_saved_by_its_worker_and_goes_on(
    here: Workspace, worker: Worker, recipe_file: Path, tmp_path: Path, digests: dict[str, str | None]
) -> None:
    machine = worker(1.5)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run_recipe, here, recipe_file, ON_POOL)
        soon(lambda: is_under_way(tmp_path), running)
        third = Workspace(tmp_path / "third", here.uri)  # only the address is given
        [seen] = read_runs(third)
        view = run_state(third, seen)
        assert (view.status, view.status_of("sft")) == ("running", "running")
        [told] = cancel_run(third, seen)
        assert "asked to stop" in told
        record, _ = running.result()
    assert (record.status, record.stages["sft"].status) == ("resumable", "resumable")
    assert record.stages["sft"].exit_code == 75
    assert cancel_run(third, read_run(third, record.run_id)) == []
    # The worker itself ends the same way: what runs is saved.
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run_recipe, here, recipe_file, ON_POOL)
        soon(lambda: computations(tmp_path).count("started") == 2, running)
        machine.send_signal(signal.SIGTERM)
        assert machine.wait(60) == 0
        worker()
        record, _ = running.result()
    assert record.status == "completed"
    assert {step: stage.digest for step, stage in record.stages.items()} == digests


def test_without_a_worker_a_run_says_what_it_waits_for_and_can_be_stopped(
    here: Workspace, prefect_url: str, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import WorkPoolFilter, WorkPoolFilterName

    from vantage.flows.pools.deployments import create_pool

    monkeypatch.setattr("vantage.flows.pools.run_on_pool.QUEUED_SECONDS", 0.5)
    of_nobody = WorkPoolFilter(name=WorkPoolFilterName(any_=["nobody"]))
    with get_client(sync_client=True) as client:
        create_pool(client, "nobody")

        def attempts() -> list[str]:
            """Return the states of the flow runs of this workspace's attempts at sft."""
            ids = {record.run_id for record in read_runs(here)}
            found = client.read_flow_runs(work_pool_filter=of_nobody)  # the server lists at most 200 of all
            named = [(run.name.split(" · "), run.state_name) for run in found]
            return [str(state) for name, state in named if name[0] == "sft" and name[1] in ids]

        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(run_recipe, here, recipe_file, "stages.sft.resources.pool=nobody")
            soon(attempts, running, pause=0.25)
            threading.Event().wait(3.0)
            [record] = read_runs(here)
            cancel_run(here, record)
            record, printed = running.result()
        assert "sft: waits for a worker of pool nobody" in printed, printed
        assert record.status == "resumable"
        assert attempts() == ["Cancelled"]
    with pytest.raises(
        ValueError, match=r"resources.pool=nowhere is no work pool .*vantage worker --pool nowhere"
    ):
        run_recipe(here, recipe_file, "stages.sft.resources.pool=nowhere")


def test_a_stage_that_waits_for_nobody_is_made_where_another_run_asks_for_it(
    here: Workspace, worker: Worker, recipe_file: Path, tmp_path: Path
) -> None:
    """Both runs get the stage, and an attempt whose ordering process has died is stopped while it waits."""
    from prefect.client.orchestration import get_client

    from vantage.flows.pools.deployments import attempt_deployment, create_pool, deploy_attempts

    on_nobody = "stages.sft.resources.pool=nobody"
    with get_client(sync_client=True) as client:
        create_pool(client, "nobody")
        deploy_attempts(client, "nobody")
        client.delete_work_pool("nobody")
        create_pool(client, "nobody")
        deploy_attempts(client, "nobody")
        assert client.read_deployment_by_name(attempt_deployment("nobody")).work_pool_name == "nobody"

    dead = start_pipeline(here, recipe_file, on_nobody)
    # a look at the bucket computes as long as the shortest pause
    soon(lambda: attempts_under_way(here, read_runs(here)[0]) if read_runs(here) else {}, pause=0.25)
    os.killpg(dead.pid, signal.SIGKILL)
    dead.communicate()
    [record] = read_runs(here)
    wait_for(lambda: not is_active(here, record.run_id), seconds=60.0, pause=0.25)
    assert cancel_run(here, record) == [
        "sft, whose run has no process any more, is asked to save its state and stop"
    ]
    assert attempts_under_way(here, record) == {}, "nobody has taken it, so nothing is saved"

    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(run_recipe, here, recipe_file, on_nobody)
        soon(lambda: any(is_active(here, each.run_id) for each in read_runs(here)), waiting, pause=0.25)
        worker()
        status = None
        try:
            other, told = run_recipe(here, recipe_file, ON_POOL, "stages.evaluation.resources.cpus=1")
            status = other.status
        finally:  # also after a timeout: the run that waits would hold up the test's process for ever
            if status != "completed":
                cancel_run(here, record)
        record, printed = waiting.result()
    assert other.status == "completed", told
    assert record.status == "completed", printed
    assert computations(tmp_path) == ["started", "finished"]
