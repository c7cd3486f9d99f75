"""Make one MLflow database once, and a workspace with a copy of it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from tests.support.made_once import made_once

ROOT = Path(__file__).parents[2]

MAKE_DATABASE = """
import sys
from pathlib import Path
from vantage.ledger.run_ledger import Ledger
ledger = Ledger(None, Path(sys.argv[1]), "made-by-two")
ledger.open_run(sys.argv[2], "two", {})
sys.exit(0 if ledger.close(120.0) else 1)
"""


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the database that two processes made which started at once in one workspace. Tests may only read it."""
    return made_once(tmp_path_factory, "ledger-database", make_database) / "mlflow.db"


def make_database(workspace: Path) -> None:
    """Have two processes make it."""
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    environment["VANTAGE_CACHE"] = str(workspace / "cache")  # a machine that has kept no tables
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MAKE_DATABASE, str(workspace), f"000{i}-two-aaaaaa"],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in (1, 2)
    ]
    said = [process.communicate(timeout=150)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert said == ["", ""]
    shutil.copy(
        workspace / "mlflow.db", workspace / "looked-at.db"
    )  # looking would open the database for writing
    found = MlflowClient(f"sqlite:///{workspace / 'looked-at.db'}")
    experiment = found.get_experiment_by_name("made-by-two")
    assert experiment is not None
    assert len(found.search_runs([experiment.experiment_id])) == 2


@pytest.fixture
def workspace(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a ready database; nothing of the caller's MLflow is touched."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    shutil.copy(database, tmp_path / "mlflow.db")
    return tmp_path
