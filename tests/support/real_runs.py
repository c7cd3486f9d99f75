"""Run fake stages under a real Prefect server, in this process or in another one, and read what Prefect shows of the run."""

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from rich.console import Console

from tests.support.fork_server import ROOT, WITH_PREFECT
from tests.support.ports import own_port
from vantage.flows.execution import execute
from vantage.flows.prefect_server.server import (
    _server_process,
    _set_environment,
    end_process,
    is_healthy,
    new_database,
)
from vantage.runs.console import Screen
from vantage.runs.record import RunRecord
from vantage.runs.resolving import load_resolved
from vantage.runs.run import acquire_run
from vantage.runs.workspace import Workspace

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, TaskRun

Starter = Callable[..., subprocess.Popen[str]]
FORKED_VANTAGE = (sys.executable, "-m", "tests.support.real_vantage")
"""The command ``vantage`` with its own stages, for ``WITH_BOTH``: it needs 14 CPU seconds less than one that imports all itself."""


def environment_of_forks() -> dict[str, str]:
    """Return the environment of a forked ``vantage``."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def run_recipe(
    workspace: Workspace,
    recipe: Path,
    *overrides: str,
    stage_function: str = "tests.support.fake_work.run_stage",
) -> tuple[RunRecord, str]:
    """Do what ``vantage run`` does, in this process; return the run and what it printed."""
    printed = io.StringIO()
    screen = Screen(Console(file=printed, width=200))
    resolved, _ = load_resolved(str(recipe), overrides)
    with acquire_run(workspace, resolved, source=str(recipe)) as run, WITH_PREFECT.children():
        record = execute(run, screen, stage_function=stage_function)
    return record, printed.getvalue()


def wait_for(condition: Callable[[], object], seconds: float = 300.0, *, pause: float = 0.05) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(pause)


def prefect_shows(flow_run_id: str) -> tuple["FlowRun", dict[str, str | None]]:
    """Return a flow run, and name → state of each of its task runs, once the server has recorded their ends."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
    from prefect.client.schemas.objects import StateType

    with get_client(sync_client=True) as client:
        chosen = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(flow_run_id)]))
        task_runs: list[TaskRun] = []

        def all_ended() -> bool:
            task_runs[:] = client.read_task_runs(flow_run_filter=chosen)
            return bool(task_runs) and all(
                each.state_type not in (None, StateType.PENDING, StateType.RUNNING) for each in task_runs
            )

        # task runs arrive as events, a moment after the flow has ended; a look computes as long as the shortest pause
        wait_for(all_ended, pause=0.25)
        flow_run = client.read_flow_run(UUID(flow_run_id))
    return flow_run, {each.name: each.state_name for each in task_runs}


@contextmanager
def prefect_at(url: str | None, **others: str) -> Iterator[None]:
    """Set the address of Prefect that a user names, for this process and its children; None: name none."""
    before = _set_environment({"PREFECT_API_URL": url, **others})
    try:
        yield
    finally:
        _set_environment(before)


@contextmanager
def configured_server(home: Path, port: int) -> Iterator[Any]:
    """Yield the process of a server as a user has one; it may be killed inside."""
    home.mkdir(exist_ok=True)
    with new_database(home), WITH_PREFECT.children():
        process = _server_process(home, port, home / "server.log")
        wait_for(lambda: is_healthy(f"http://127.0.0.1:{port}/api"))
    try:
        yield process
    finally:
        end_process(process)


@contextmanager
def evaluating_automations(folder: Path, monkeypatch: pytest.MonkeyPatch) -> "Iterator[SyncPrefectClient]":
    """Start a Prefect server as ``make servers`` does, with the services that evaluate automations; yield a client."""
    from prefect.client.orchestration import get_client

    from vantage.flows.pools.deployments import create_pool
    from vantage.flows.prefect_server import server as servers

    monkeypatch.setattr(servers, "DISABLED_SERVICES", ("DB_VACUUM", "LATE_RUNS", "SCHEDULER"))
    port = own_port()
    with (
        configured_server(folder / "prefect", port),
        prefect_at(f"http://127.0.0.1:{port}/api", PREFECT_HOME=str(folder / "home")),
        get_client(sync_client=True) as client,
    ):
        create_pool(client, "orders")
        yield client
