"""The command that shows a workspace's database in MLflow, as Prefect's page of a run has it, answers and shows the run."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from vantage.ledger.run_ledger import Ledger
from vantage.runs import own_commands

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def usual_ports_are_taken() -> Iterator[None]:
    with ExitStack() as held:
        for port in (4200, 5000):
            listening = held.enter_context(socket.socket())
            with suppress(OSError):  # by another program of this machine
                listening.bind(("127.0.0.1", port))
                listening.listen()
        yield


@contextmanager
def started(command: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a printed line as a stranger would, without our variables and in another folder. Yields its process."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))
    }
    with (folder / "printed.log").open("wb") as log:
        process = subprocess.Popen(
            command, shell=True, env=environment, cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answer(url: str, process: subprocess.Popen[bytes], folder: Path, data: object = None) -> str:
    """Wait for the server to answer, and return its answer."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    body = None if data is None else json.dumps(data).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), direct.open(request, timeout=20) as said:
            return str(said.read().decode())
        time.sleep(0.5)
    raise AssertionError((folder / "printed.log").read_text())


def test_the_printed_mlflow_shows_the_workspace_s_database(tmp_path: Path) -> None:
    workspace = tmp_path / "work space"
    workspace.mkdir()
    with Ledger(f"sqlite:///{workspace / 'mlflow.db'}", workspace, "printed") as ledger:
        ledger.open_run("0001-printed-abcdef", "printed", {"recipe": "printed"})
        ledger.finish_run("completed")
        assert ledger.flush(300)
        written = ledger.where()
    port = own_commands.usable_port(5000)
    assert port != 5000
    command = f"{own_commands.program('mlflow')}{written.removeprefix('mlflow')} --port {port}"
    with started(command, tmp_path) as process:
        url = f"http://127.0.0.1:{port}/api/2.0/mlflow/experiments/search"
        assert '"printed"' in answer(url, process, tmp_path, {"max_results": 10})
