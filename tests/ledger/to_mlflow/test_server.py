"""Opening MLflow makes or restores its experiments, and distinguishes errors that are final from those that may pass."""

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos import databricks_pb2

from vantage.ledger.to_mlflow.server import (
    EXPERIMENT_TAG,
    Server,
    is_database,
    is_permanent_error,
)


def server_of(workspace: Path) -> Server:
    return Server(f"sqlite:///{workspace / 'mlflow.db'}", artifacts=workspace / "mlartifacts")


def test_an_experiment_is_made_once_and_marked_as_ours(workspace: Path) -> None:
    made = server_of(workspace).experiment("tiny")
    found = server_of(workspace).experiment("tiny")
    assert made.experiment_id == found.experiment_id
    assert found.tags[EXPERIMENT_TAG] == "true"
    assert found.artifact_location.startswith((workspace / "mlartifacts").as_uri())
    assert made.experiment_id in server_of(workspace).experiment_ids()


def test_our_own_database_is_its_owners_alone_and_somebody_elses_stays_as_it_is(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        client = server_of(tmp_path).client
        client.create_run(client.create_experiment("tiny"))
        theirs = tmp_path / "team"
        theirs.mkdir()
        shutil.copy(tmp_path / "mlflow.db", theirs / "mlflow.db")
        (theirs / "mlflow.db").chmod(0o664)
        Server(f"sqlite:///{theirs / 'mlflow.db'}", artifacts=tmp_path / "mlartifacts")
    finally:
        os.umask(before)
    modes = {
        path.name: path.stat().st_mode & 0o777
        for path in tmp_path.glob("mlflow.db*")
        if path.suffix != ".lock"
    }
    assert modes["mlflow.db"] == 0o600 and set(modes.values()) == {0o600}
    assert (theirs / "mlflow.db").stat().st_mode & 0o777 == 0o664


@pytest.mark.slow
def test_the_next_workspaces_database_is_as_the_first_and_was_not_migrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "cache"))
    first, second = tmp_path / "first", tmp_path / "second"
    server_of(first).experiment("of the first")
    with monkeypatch.context() as patch:
        patch.setattr("mlflow.store.db.utils._upgrade_db", None)  # calling it would fail
        patch.setattr("mlflow.store.db.utils._initialize_tables", None)
        names = [each.name for each in server_of(second).client.search_experiments()]
    assert names == ["Default"]
    dumps = []
    for workspace in (first, second):
        with closing(sqlite3.connect(workspace / "mlflow.db")) as connection:
            connection.executescript("DELETE FROM experiment_tags; DELETE FROM experiments;")
            dumps.append(sorted(connection.iterdump()))
    assert dumps[0] == dumps[1]
    assert server_of(second).experiment("of the second").experiment_id


def test_an_experiment_of_somebody_elses_is_written_to_and_marked(workspace: Path) -> None:
    theirs = server_of(workspace).client.create_experiment("tiny")
    assert theirs not in server_of(workspace).experiment_ids()
    assert server_of(workspace).experiment("tiny").experiment_id == theirs
    assert theirs in server_of(workspace).experiment_ids()


def test_a_deleted_experiment_is_restored_and_that_is_said(
    workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = server_of(workspace).experiment("tiny")
    server_of(workspace).client.delete_experiment(made.experiment_id)
    found = server_of(workspace).experiment("tiny")
    assert found.experiment_id == made.experiment_id
    assert made.experiment_id in server_of(workspace).experiment_ids()
    assert "MLflow's experiment 'tiny' was deleted; it is restored for this run" in caplog.text


@pytest.mark.parametrize(
    ("address", "there_is_none"),
    [
        ("sqlite:////data/mlflow.db", True),
        ("postgresql+psycopg2://user:secret@host/mlflow", True),
        ("mysql+pymysql://host/mlflow", True),
        ("http://127.0.0.1:5000", False),
        ("https://mlflow.example", False),
        ("databricks", False),
    ],
)
def test_a_database_is_told_from_a_server_that_has_a_place_for_artifacts(
    address: str, there_is_none: bool
) -> None:
    assert is_database(address) == there_is_none


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (MlflowException("a param changed", databricks_pb2.INVALID_PARAMETER_VALUE), True),
        (MlflowException("deleted", databricks_pb2.INVALID_STATE), True),
        (MlflowException("down", databricks_pb2.INTERNAL_ERROR), False),
        (MlflowException("busy", databricks_pb2.TEMPORARILY_UNAVAILABLE), False),
        (ConnectionResetError("cut"), False),
        (KeyError("our own"), True),
    ],
)
def test_what_would_be_refused_again_tomorrow_is_told_from_what_may_work(
    error: Exception, final: bool
) -> None:
    assert is_permanent_error(error) == final
