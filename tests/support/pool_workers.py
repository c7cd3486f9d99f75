"""Start workers of a pool, which share nothing with a run but a bucket and a Prefect server; only stages are fake."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.support.fork_server import WITH_PREFECT
from tests.support.real_runs import wait_for
from vantage.runs.workspace import Workspace

ROOT = Path(__file__).parents[2]
POOL = "gpu"
ON_POOL = f"stages.sft.resources.pool={POOL}"

FAKED = f"{ROOT}{os.pathsep}{ROOT / 'tests/flows/pools/fake'}"
VANTAGE = "from vantage.cli.main import main; main()"

Worker = Callable[..., subprocess.Popen[bytes]]


def soon(
    condition: Callable[[], object], running: "Future[Any] | None" = None, *, pause: float = 0.05
) -> None:
    """Wait for the condition; a run that has ended meanwhile tells why."""
    wait_for(lambda: condition() or (running is not None and running.done()), seconds=100.0, pause=pause)
    if running is not None and running.done():
        print(running.result())
    assert condition()


def kill_all(process: subprocess.Popen[Any]) -> None:
    """Kill a worker with everything that it has started: its machine is lost."""
    with suppress(psutil.NoSuchProcess):
        lost = psutil.Process(process.pid)
        for each in [*lost.children(recursive=True), lost]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def computations(tmp_path: Path, step: str = "sft") -> list[str]:
    """Return ``started`` and ``finished`` of the step's computations on all workers."""
    lines = [
        line
        for file in sorted(tmp_path.glob("worker-*/events.txt"))
        for line in file.read_text().splitlines()
    ]
    return [line.split()[1] for line in lines if line.startswith(f"{step} ")]


def is_under_way(tmp_path: Path) -> bool:
    """Return whether a worker computes sft and has saved a checkpoint."""
    return any(tmp_path.glob("worker-*/*/scratch/*/checkpoints/checkpoint*"))


def start_pipeline(workspace: Workspace, recipe: Path, override: str = ON_POOL) -> subprocess.Popen[str]:
    """Start ``vantage run`` in a process group of its own."""
    command = [sys.executable, "-c", VANTAGE, "run", str(recipe), "--set", override]
    return WITH_PREFECT.popen(
        [*command, "--workspace", workspace.address],
        env={**os.environ, "PYTHONPATH": FAKED},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def in_a_process(workspace: Workspace, recipe: Path) -> int:
    """Return the exit code of ``vantage run``."""
    process = start_pipeline(workspace, recipe)
    print(process.communicate()[0])
    return process.returncode


def assert_quiet(printed: str) -> None:
    """Check that no traceback was printed, and at most four lines about the outage: one a minute, as it lasted less
    than four minutes.
    """
    assert "Traceback" not in printed
    assert "Error logging to API" not in printed
    assert 1 <= printed.count("has not answered since") <= 4, printed
