"""A destination that refuses records is asked again after a while, and once more at the end of the run."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vantage.ledger.destinations import delivery
from vantage.ledger.outbox import Outbox


class Place:
    name, address = "archive", "https://archive.invalid/?token=secret"


class Refused:
    """Stand in for ``Delivery``: each sending is counted, and refused."""

    tried = 0

    def __init__(self, place: Any, outbox: Outbox) -> None: ...

    def send(self) -> None:
        Refused.tried += 1
        raise OSError("the disk is full")


def test_it_is_asked_again_after_a_while_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(f"{delivery.__name__}.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(delivery, "Delivery", Refused)
    monkeypatch.setattr(Refused, "tried", 0)
    outbox = Outbox(tmp_path / "0001" / "ledger")
    sender = delivery._Sender(Place(), tmp_path)  # type: ignore[arg-type]
    tried = []
    with caplog.at_level(logging.WARNING):
        for seconds, is_last in [
            *((0.0, False), (delivery.RETRY_SECONDS - 1, False), (delivery.RETRY_SECONDS - 1, True)),
            *((delivery.RETRY_SECONDS, False), (2 * delivery.RETRY_SECONDS, False)),
        ]:
            now = 1000.0 + seconds
            sender.send(outbox, is_last=is_last)
            tried.append(Refused.tried)
    # the second refusal, at RETRY_SECONDS − 1, begins the wait anew
    assert tried == [1, 1, 2, 2, 3]
    [warning] = caplog.messages
    assert "archive" in warning and "the disk is full" in warning and "the run goes on" in warning
