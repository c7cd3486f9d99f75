"""Serve the pages of MLflow and Prefect for a workspace's own databases, on loopback, for the time of a block."""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vantage.attempts.identity.child_python import python_environment
from vantage.attempts.launchers.local_process import last_line
from vantage.flows.prefect_server.server import LOOPBACK, ServerUnavailable, end_process, prefect_server
from vantage.ledger import tracking
from vantage.runs.own_commands import usable_port
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.storage.durable_files import make_folder, open_private

START_SECONDS = 120.0
"""Seconds for MLflow's server to start, which usually takes some seconds."""


@contextmanager
def user_interfaces(workspace: Workspace) -> Iterator[dict[str, str]]:
    """Yield program → address of its page: the configured server, or a server that is started for the block.

    Raises:
        ValueError: the workspace has no records that a server could show.
        vantage.flows.prefect_server.server.ServerUnavailable: a server does not start, or does not answer.
    """
    records = tracking.address(None, workspace.root)
    if tracking.is_missing_database(records):
        raise ValueError(f"no run is recorded in {workspace.address} yet; run a recipe there first")
    with prefect_server(workspace.root) as api, _mlflow(workspace, records) as mlflow:
        _show_runs_that_reused_everything(workspace)
        compared = _list_of_newest_recipe(workspace, mlflow)
        yield {
            "MLflow": mlflow,
            "Prefect": tracking.without_password(api.removesuffix("/api")),
            **({} if compared is None else {"compare": compared}),
        }


def _list_of_newest_recipe(workspace: Workspace, mlflow: str) -> str | None:
    """Return the address of MLflow's list of the runs of the recipe that ran last; None if MLflow does not have that run."""
    tracking.set_up_client()
    from vantage.ledger.to_mlflow.list_of_runs import page_of_runs  # imports MLflow, which takes a second

    run_id = next((record.mlflow_run_id for record in read_runs(workspace) if record.mlflow_run_id), None)
    if run_id is None:
        return None
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{mlflow}/ajax-api/2.0/mlflow/runs/get?run_id={run_id}", timeout=5) as answer:
            found = json.load(answer)["run"]["info"]["experiment_id"]
    except (OSError, ValueError, KeyError):  # a server that asks for a login, or that has removed the run
        return None
    return f"{mlflow}/{page_of_runs(str(found))}"


def _show_runs_that_reused_everything(workspace: Workspace) -> None:
    from vantage.flows.reused_runs import show_earlier_runs  # imports Prefect, which takes a second

    asyncio.run(show_earlier_runs(workspace))


@contextmanager
def _mlflow(workspace: Workspace, records: str) -> Iterator[str]:
    """Yield the address of MLflow's page; starts a server if the records are in a database."""
    if records.startswith("http"):
        yield tracking.without_password(records)
        return
    port, log = usable_port(5000), workspace.root / "mlflow" / "server.log"
    make_folder(log.parent)
    with open(log, "wb", opener=open_private) as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "vantage.flows.prefect_server.tied_process"),
                *("mlflow", "server", "--host", LOOPBACK, "--port", str(port), "--workers", "1"),
            ],
            stdin=subprocess.PIPE,  # the server ends when it closes
            stdout=output,
            stderr=subprocess.STDOUT,
            # not among the arguments, which every user of the machine sees: it may have a password
            env={**os.environ, "MLFLOW_BACKEND_STORE_URI": records, **python_environment()},
            start_new_session=True,
        )
    try:
        address = f"http://{LOOPBACK}:{port}"
        _wait_until_it_answers(process, address, log)
        yield address
    finally:
        end_process(process)


def _wait_until_it_answers(process: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with direct.open(f"{address}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise ServerUnavailable(f"MLflow's server did not come up: {last_line(log)} ({log})")
