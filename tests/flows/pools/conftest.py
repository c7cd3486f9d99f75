"""Start a worker of a pool, and make a workspace in a bucket that a run shares with it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fork_server import WITH_PREFECT
from tests.support.pool_workers import FAKED, POOL, VANTAGE, Worker, kill_all, soon
from vantage.runs.workspace import Workspace


@pytest.fixture(scope="module", autouse=True)
def _sends_nothing(unsent: None) -> None:
    """Send nothing to MLflow; no test here looks at it."""


@pytest.fixture
def worker(prefect_url: str, bucket: str, tmp_path: Path) -> Iterator[Worker]:
    """Start a worker of the pool on a machine of its own: its cache, and the pace of its fake stages, are its own."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(seconds: float = 0.3) -> subprocess.Popen[bytes]:
        machine = tmp_path / f"worker-{len(processes)}"
        machine.mkdir()
        (machine / "seconds.txt").write_text(str(seconds))
        process = WITH_PREFECT.popen(
            [sys.executable, "-c", VANTAGE, "worker", "--pool", POOL, "--name", machine.name],
            cwd=tmp_path,
            env={
                **os.environ,
                "VANTAGE_CACHE": str(machine),
                "PREFECT_WORKER_QUERY_SECONDS": "0.5",
                "PYTHONPATH": FAKED,
            },
            stdout=(machine / "log.txt").open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        processes.append(process)
        soon(lambda: process.poll() is not None or is_deployed(), pause=0.25)
        return process

    def is_deployed() -> bool:
        return any(each.name == POOL for each in client.read_deployments())

    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        yield start
    for process in processes:
        kill_all(process)
    for number in range(len(processes)):
        print((tmp_path / f"worker-{number}" / "log.txt").read_text())


@pytest.fixture
def here(bucket: str, tmp_path: Path, ledger_database: str, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Return the workspace in the bucket, as the machine of the run sees it."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ledger_database)
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "here"))
    monkeypatch.setattr("vantage.flows.pools.run_on_pool.SECONDS_BETWEEN_REPORTS", 0.5)
    monkeypatch.setattr("vantage.flows.pools.run_on_pool.SILENT_SECONDS", 12.0)
    monkeypatch.setattr("vantage.storage.leases.LEASE_SECONDS", 5.0)
    return Workspace.at(bucket)
