"""A run that is killed again and again, whatever it is doing, still ends with what it would have ended with."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.fork_server import WITH_PREFECT
from tests.support.orchestrated import attempt_all, events, orchestrated, pace
from vantage.ledger.run_ledger import Ledger
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
KILLS = 20
DRIVER = """
import sys
from multiprocessing import forkserver
from pathlib import Path

preload = forkserver.set_forkserver_preload
forkserver.set_forkserver_preload = lambda modules: preload(["tests.support.fake_work"])  # which needs no torch

from tests.support.orchestrated import attempt_all, orchestrated
from vantage.runs.workspace import Workspace
from vantage.ledger.run_ledger import Ledger

Ledger.warm_up = lambda ledger: None  # what it records waits in the outbox; sending has tests of its own

with orchestrated(Workspace(Path(sys.argv[1])), Path(sys.argv[2])) as orchestrator:
    print("begun", flush=True)
    attempt_all(orchestrator)
    orchestrator.run.update(status=orchestrator.run.outcome())
"""


def drive(workspace: Workspace, recipe: Path) -> subprocess.Popen[str]:
    """Return a process that runs the recipe, once it has begun to."""
    process = WITH_PREFECT.popen(
        [sys.executable, "-c", DRIVER, str(workspace.root), str(recipe)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def started(workspace: Workspace) -> int:
    """Return how many attempts have begun to compute."""
    return sum(" started " in line for line in events(workspace))


def takes_steps(workspace: Workspace, begun: int) -> bool:
    """Return whether an attempt begun since then is at its steps; models and data are made at once, so no kill hits them."""
    if started(workspace) == begun:
        return False
    step, event, _ = events(workspace)[-1].split()
    return event == "started" and step.partition(".")[0] not in ("model", "data")


def test_a_run_killed_twenty_times_at_random_ends_with_the_digests_of_one_that_never_was(
    workspace: Workspace, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ledger, "warm_up", lambda ledger: None)
    with orchestrated(Workspace(tmp_path / "whole"), recipe_file) as whole:
        expected = {name: stage.digest for name, stage in attempt_all(whole).items()}

    pace(workspace, 0.3)  # twelve steps a stage: 18 seconds of work, and what every kill takes away
    chance = random.Random(7)
    for number in range(KILLS):
        begun = started(workspace)
        process = drive(workspace, recipe_file)
        while number % 2 and not takes_steps(workspace, begun) and process.poll() is None:
            time.sleep(0.02)  # every other kill hits a stage at its steps, the rest whatever comes first
        time.sleep(chance.uniform(0.0, 1.2))
        assert process.poll() is None, "it was over before it could be killed"
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    pace(workspace, 0.0)
    process = drive(workspace, recipe_file)
    process.communicate(timeout=300)
    assert process.returncode == 0
    [record] = read_runs(workspace)
    assert {name: stage.digest for name, stage in record.stages.items()} == expected
    assert {stage.status for stage in record.stages.values()} <= {"completed", "reused"}
    finished = sum(" finished " in line for line in events(workspace))
    assert started(workspace) >= finished + KILLS // 4, "kills hit stages that were computing"
    assert json.loads((workspace.folder(record.run_id) / "run.json").read_text())["status"] == "completed"
