"""An address of MLflow is accepted or refused by rule, and shown without its password."""

import os
import re
from pathlib import Path

import pytest

from tests.support.every import every
from vantage.ledger.run_ledger import Ledger
from vantage.ledger.tracking import check_address, set_up_client, without_password


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://me:secret@host:5000/x", "http://host:5000/x"),
        ("http://host:5000", "http://host:5000"),
        ("sqlite:////a/b@c.db", "sqlite:////a/b@c.db"),
    ],
)
def test_an_address_is_shown_without_its_password(uri: str, shown: str) -> None:
    assert without_password(uri) == shown


def test_where_a_database_is_looked_at_is_said_without_its_password(tmp_path: Path) -> None:
    ledger = Ledger("postgresql://me:secret@host/ledger", tmp_path, "tiny")
    said = "mlflow server --host 127.0.0.1 --backend-store-uri postgresql://host/ledger"
    assert ledger.where() == said


@every(
    ("uri", "why"),
    [
        ("./mlruns", "is a folder"),
        ("mlruns", "is a folder"),
        ("/data/mlruns", "is a folder"),
        ("file:/data/mlruns", "is a folder"),
        ("file:///data/mlruns", "is a folder"),
        ("C:\\mlruns", "is a folder"),
        ("http://", "names no host"),
        ("http:///mlflow", "names no host"),
        ("https://:5000", "names no host"),
        ("http://host name:5000", "names no host"),
        ("http://host:port", "is not an address"),
        ("http://host:99999", "is not an address"),
        ("http://[::1", "is not an address"),
        (" http://host:5000", "is not an address"),
        ("localhost:5000", "begins with localhost:"),
        ("htp://host:5000", "begins with htp:"),
        ("s3://bucket/mlflow", "begins with s3:"),
        ("uc:catalog", "begins with uc:"),
        ("sqlite://", "names no file"),
        ("sqlite:///", "names no file"),
        ("sqlite:mlflow.db", "names no file"),
        ("sqlite://mlflow.db", "names no file"),
        ("sqlite:///:memory:", "names no file"),
    ],
)
def test_an_address_at_which_mlflow_keeps_nothing_is_refused(uri: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)) as refused:
        check_address(uri)
    assert str(refused.value).startswith(f"MLFLOW_TRACKING_URI={uri!r}")
    assert "or unset it" in str(refused.value)


@every(
    "uri",
    [
        *(
            "http://127.0.0.1:1",
            "https://mlflow.example.org/team",
            "http://[::1]:5000",
            "http://me:secret@host:5000",
        ),
        *("sqlite:///mlflow.db", "sqlite:////a b/mlflow.db", "postgresql://me:secret@host/ledger"),
        *(
            "postgresql+psycopg2://host/ledger",
            "mysql+pymysql://host/ledger",
            "databricks",
            "databricks://profile",
        ),
    ],
)
def test_an_address_is_accepted_whether_or_not_a_server_answers(uri: str) -> None:
    check_address(uri)


def test_a_refusal_shows_no_password() -> None:
    with pytest.raises(ValueError, match="MLFLOW_TRACKING_URI") as refused:
        check_address("ftp://me:secretpassword@host/mlflow")
    assert "secretpassword" not in str(refused.value)


def test_a_database_with_a_login_is_named_by_the_variable_that_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me:secret@host/ledger")
    said = 'mlflow server --host 127.0.0.1 --backend-store-uri "$MLFLOW_TRACKING_URI"'
    assert Ledger(None, tmp_path, "tiny").where() == said


def test_mlflows_client_does_not_go_on_with_another_projects_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_REGISTRY_URI"):
        monkeypatch.setenv(name, "of another")
    monkeypatch.setenv("MLFLOW_ENABLE_ASYNC_LOGGING", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "7")
    set_up_client()
    left = {
        name for name in os.environ if name.startswith(("MLFLOW_RUN", "MLFLOW_EXPERIMENT", "MLFLOW_REGISTRY"))
    }
    assert left == set()
    assert os.environ["MLFLOW_ENABLE_ASYNC_LOGGING"] == "false"
