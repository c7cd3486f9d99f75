"""Make ledgers whose records stay in the outbox, for destinations that read them from there."""

from collections.abc import Callable
from pathlib import Path

import pytest

from vantage.ledger.outbox import Outbox
from vantage.ledger.run_ledger import Ledger


class NoSender:
    """A stand-in for the sender to MLflow: nothing leaves the outbox."""

    def __init__(self, *ignored: object) -> None:
        pass

    def notify(self, outbox: Outbox, *, can_wait: bool = False) -> None:
        pass

    def close(self, timeout_seconds: float) -> bool:
        return False


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Ledger]:
    """Return a function that opens ledgers of one workspace, one after the other as processes do; MLflow does not
    answer.
    """
    monkeypatch.setattr("vantage.ledger.run_ledger.Sender", NoSender)
    return lambda: Ledger("http://127.0.0.1:1", tmp_path, "small")
