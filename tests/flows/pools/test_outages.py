"""Attempts survive a Prefect server that stops while a worker computes, and is started again; only stages are fake."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.support.pool_workers import ON_POOL, Worker, assert_quiet, is_under_way, soon, start_pipeline
from tests.support.ports import own_port
from tests.support.real_runs import configured_server, prefect_at, prefect_shows, run_recipe
from vantage.attempts.exit_codes import ExitCode
from vantage.runs.run import read_run, read_runs
from vantage.runs.workspace import Workspace

pytestmark = pytest.mark.slow


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "prefect-home"


@pytest.fixture
def port() -> int:
    return own_port()


@pytest.fixture
def prefect_url(home: Path, port: int) -> Iterator[str]:
    """Yield the address of a server that each test starts itself; it may be killed."""
    url = f"http://127.0.0.1:{port}/api"
    with prefect_at(url, PREFECT_HOME=str(home), PREFECT_CLIENT_MAX_RETRIES="0"):
        yield url


@pytest.fixture
def server(home: Path, port: int, prefect_url: str) -> Iterator[Any]:
    with configured_server(home, port) as process:
        yield process


def states(flow_run_name: str) -> list[tuple[str | None, str]]:
    """Return state and message of the flow runs of that name."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        found = [each for each in client.read_flow_runs() if each.name == flow_run_name]
    return [(each.state_name, (each.state and each.state.message) or "") for each in found]


def has_recorded_ends(workspace: Workspace) -> bool:
    """Return whether the server shows the end of every step that has ended; it keeps events in its memory for a moment."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    [record] = read_runs(workspace)
    chosen = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(record.prefect_flow_run_ids[0])]))
    with get_client(sync_client=True) as client:
        shown = {each.name: each.state_name for each in client.read_task_runs(flow_run_filter=chosen)}
    ended = [step for step, stage in record.stages.items() if stage.status == "completed"]
    return all(shown.get(f"{step} · attempt 1") == "Completed" for step in ended)


def test_after_an_outage_prefect_shows_how_an_attempt_and_its_run_ended(
    server: Any, here: Workspace, worker: Worker, recipe_file: Path, tmp_path: Path, home: Path, port: int
) -> None:
    machine = worker(2.0)  # so that the pipeline asks for the attempt several times during the outage
    pipeline = start_pipeline(here, recipe_file)
    soon(lambda: is_under_way(tmp_path))
    soon(lambda: has_recorded_ends(here), pause=0.25)
    server.kill()
    printed, _ = pipeline.communicate(timeout=300)
    assert pipeline.returncode == ExitCode.UNAVAILABLE, printed
    [record] = read_runs(here)
    assert (record.status, record.stages["sft"].attempt) == ("completed", 1)
    assert "the run has ended all the same (completed)" in printed
    assert_quiet(printed)
    with configured_server(home, port):
        run_recipe(here, recipe_file, ON_POOL)
        _, task_runs = prefect_shows(record.prefect_flow_run_ids[0])
        assert states(f"sft · {record.run_id} · 1") == [("Completed", "")]
        assert states(record.run_id) == [("Completed", "9 completed")]
        assert set(task_runs.values()) == {"Completed"}, (task_runs, printed)
        log = tmp_path / "worker-0" / "log.txt"
        soon(lambda: "answers again" in log.read_text())
        assert machine.poll() is None
        assert_quiet(log.read_text())
    assert read_run(here, record.run_id).open_flow_runs == ()
