"""Make a small recipe, a workspace, one MLflow database and one Prefect server, for all tests of runs."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.fork_server import WITH_PREFECT
from tests.support.made_once import made_once
from tests.support.models_in_threads import models_in_threads
from tests.support.ports import own_port
from tests.support.real_runs import prefect_at, wait_for
from tests.support.unsent import SENDS_NOTHING, VARIABLE
from vantage.flows.prefect_server.server import (
    _server_process,
    end_process,
    is_healthy,
    new_database,
)
from vantage.ledger.sender import Sender
from vantage.runs.workspace import Workspace

ROOT = Path(__file__).parents[2]

RECIPE = """\
recipe: fake
seed: 17
model: {source: "builtin:tiny"}
data:
  demonstrations: {source: "builtin:arithmetic/demonstrations"}
  preferences: {source: "builtin:arithmetic/preferences"}
  prompts: {source: "builtin:arithmetic/prompts"}
rewards:
  main: {terms: [{model: reward}]}
stages:
  sft: {kind: sft, data: demonstrations}
  reward: {kind: reward_model, init: sft, data: preferences, gate: {metric: pair_accuracy, at_least: 0.75}}
  value:
    kind: value_pretraining
    policy: sft
    init: reward
    reward: main
    prompts: prompts
    gate: {metric: explained_variance, at_least: 0.3}
  policy:
    kind: policy_optimization
    algorithm: {preset: vapo, length_adaptive_alpha: 1.0}
    init: sft
    critic: value
    reward: main
    prompts: prompts
  evaluation:
    kind: evaluation
    candidate: policy
    baseline: sft
    judge: {verifier: arithmetic}
    prompts: prompts
    gate: {metric: accuracy_gain, at_least: 0.0}
"""


@pytest.fixture(scope="module")
def unsent() -> Iterator[None]:
    """Send nothing to MLflow while the tests of a module run, nor from the processes of fake stages that they start."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(VARIABLE, "1")
        for name, method in SENDS_NOTHING.items():
            patched.setattr(Sender, name, method)
        yield


@pytest.fixture(scope="session")
def ledger_database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the address of an MLflow database that the first test to use it makes."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture
def workspace(tmp_path: Path, ledger_database: str, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Return an empty workspace whose ledger writes to the shared database."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ledger_database)
    return Workspace(tmp_path / "workspace")


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    """Return the small recipe as a file."""
    path = tmp_path / "fake.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="session")
def small_lora_run(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Return the workspace, with a ledger of its own, of a run that trained adapters. Tests may only read it."""
    from tests.support.small_chat_run import LORA, make_small_chat_run  # loads torch

    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("MLFLOW_TRACKING_URI", raising=False)
        folder = made_once(
            tmp_path_factory, "small-lora", lambda folder: make_small_chat_run(folder, None, *LORA)
        )
        return Workspace(folder / "workspace")


@pytest.fixture
def model_threads() -> Iterator[None]:
    """Let commands of this process open models in threads; a test of each command opens them in processes."""
    with models_in_threads():
        yield


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    """Yield the process id and the API's URL of a Prefect server as a user has one, started once for all tests.

    Nothing is pointed at it yet, and it is stopped: a server that waits computes for a minute in an hour.
    """
    home, port = tmp_path_factory.mktemp("prefect-server"), own_port()
    url = f"http://127.0.0.1:{port}/api"
    with new_database(home), WITH_PREFECT.children():
        process = _server_process(home, port, home / "server.log")
        wait_for(lambda: is_healthy(url))
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield process.pid, url
    finally:
        os.kill(process.pid, signal.SIGCONT)
        end_process(process)


@pytest.fixture(scope="module")
def prefect_url(shared_server: tuple[int, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the session's Prefect server, named to us and to our children as a user would name one."""
    pid, url = shared_server
    os.kill(pid, signal.SIGCONT)
    with prefect_at(url, PREFECT_HOME=str(tmp_path_factory.mktemp("home"))):
        yield url
    os.kill(pid, signal.SIGSTOP)


@pytest.fixture
def start_vantage(workspace: Workspace, recipe_file: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the command line with fake stages, in a process group of its own, which does not outlive the test.

    It is forked; with ``imports=True`` it imports all itself, and so does its Prefect server.
    """
    processes: list[subprocess.Popen[str]] = []

    def start_one(*options: str, imports: bool = False) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.support.fake_vantage", "run", str(recipe_file), "--workspace"]
        process = (subprocess.Popen if imports else WITH_PREFECT.popen)(
            [*command, str(workspace.root), *options],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield start_one
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        print(*process.communicate())
