"""Which MLflow, and what may be shown of its address."""

import pytest

from tasks.ledger.tracking import without_password


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
