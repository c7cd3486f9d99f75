"""Which MLflow, and what may be shown of its address."""

from pathlib import Path

import pytest

from vantage.ledger.run_ledger import Ledger
from vantage.ledger.tracking import without_password


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
