"""PostgreSQL stops while a pipeline computes, and comes back; Prefect and MLflow run on, and only stages are fake."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from typer.testing import CliRunner

from deploy.servers.lifecycle import read_settings
from deploy.servers.postgres import OwnPostgres, data_folder
from deploy.servers.settings import Settings, write_private
from tests.deploy.conftest import Servers, own_ports
from tests.support.pool_workers import Worker, assert_quiet, is_under_way, kill_all, start_pipeline
from tests.support.real_runs import prefect_at, run_recipe, wait_for
from vantage.cli.main import app
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace

pytestmark = pytest.mark.slow

STEP_SECONDS = "0.7"
"""Seconds of each of a stage's twelve steps here."""
AWAY_SECONDS = 40.0
"""Seconds without PostgreSQL: Prefect's server tries six times to record a task run's event, at intervals of five seconds,
and keeps those that it has not recorded in a queue, of which it records one in five seconds."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Not yet started; stopped and deleted in the end."""
    made = Servers(tmp_path_factory.mktemp("servers"))
    settings = Settings(postgres_folder=data_folder(made.folder), ports=own_ports())
    write_private(made.folder / "settings.json", settings.model_dump_json())
    yield made
    made.down("--delete")


@pytest.fixture(scope="module")
def variables(servers: Servers) -> dict[str, str]:
    """The variables of the running servers."""
    return servers.up()[0]


@pytest.fixture(scope="module")
def ledger_database(variables: dict[str, str]) -> str:
    return variables["MLFLOW_TRACKING_URI"]


@pytest.fixture
def prefect_url(variables: dict[str, str], tmp_path: Path) -> Iterator[str]:
    logins = {name: value for name, value in variables.items() if name != "PREFECT_API_URL"}
    with prefect_at(variables["PREFECT_API_URL"], PREFECT_HOME=str(tmp_path / "home"), **logins):
        yield variables["PREFECT_API_URL"]


def shown(flow_run_id: str) -> tuple[Counter[tuple[str, str | None]], dict[str, str | None]]:
    """The named task runs of a flow run with their states, and the state of each flow run, as Prefect shows them now."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    its = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(flow_run_id)]))
    with get_client(sync_client=True) as client:
        task_runs = client.read_task_runs(flow_run_filter=its)
        flow_runs = client.read_flow_runs()
    named = Counter((each.name, each.state_name) for each in task_runs if "attempt" in each.name)
    return named, {each.name: each.state_name for each in flow_runs}


@pytest.mark.timeout(600)
def test_a_run_outlasts_its_servers_database(
    servers: Servers, here: Workspace, worker: Worker, recipe_file: Path, tmp_path: Path
) -> None:
    """It is away while an attempt on a pool ends, a stage of this machine begins and ends, and the next one begins."""
    machine = worker(float(STEP_SECONDS))
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "seconds.txt").write_text(STEP_SECONDS)
    events = tmp_path / "here" / "events.txt"
    pipeline = start_pipeline(here, recipe_file)
    try:
        wait_for(lambda: is_under_way(tmp_path))
        postgres, stopped = OwnPostgres(read_settings(servers.folder)), time.monotonic()
        assert postgres.stop()
        wait_for(lambda: events.exists() and "value started" in events.read_text())
        time.sleep(max(0.0, stopped + AWAY_SECONDS - time.monotonic()))
        assert pipeline.poll() is None, "it ends after the outage"
        assert postgres.ensure_running()
        printed, _ = pipeline.communicate(timeout=300)
    finally:
        kill_all(pipeline)
    assert pipeline.returncode == 0, printed

    [record] = read_runs(here)
    assert (record.status, record.open_flow_runs) == ("completed", ())
    task_runs, flow_runs = shown(record.prefect_flow_run_ids[0])
    assert task_runs == Counter((f"{step} · attempt 1", "Completed") for step in record.stages)
    assert flow_runs == {record.run_id: "Completed", f"sft · {record.run_id} · 1": "Completed"}
    assert "MLflow has not got all records" not in printed
    assert printed.count("cannot be reached") <= 1
    audited = CliRunner().invoke(app, ["audit", record.run_id, "--workspace", here.address])
    assert audited.exit_code == 0, audited.output
    assert_quiet(printed)
    assert_quiet((tmp_path / "worker-0" / "log.txt").read_text())
    assert machine.poll() is None

    undisturbed, _ = run_recipe(Workspace(tmp_path / "undisturbed"), recipe_file)
    assert {step: stage.digest for step, stage in record.stages.items()} == {
        step: stage.digest for step, stage in undisturbed.stages.items()
    }
