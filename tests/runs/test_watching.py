"""While a stage computes, each committed line of its journal is sent to the ledger once."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vantage.runs import watching


def test_each_part_of_the_journal_is_sent_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = iter([0, 10, 10, 25, 25])
    sent: list[Any] = []
    monkeypatch.setattr(watching, "SECONDS_BETWEEN_METRICS", 0.0)
    monkeypatch.setattr(watching, "read_committed", lambda scratch: (1, next(committed)))
    monkeypatch.setattr(watching, "journal_entries", lambda scratch, *, start, end: [(start, end)])
    ledger: Any = SimpleNamespace(send_metrics=lambda step, entries: sent.append((step, entries)))
    watcher: Any = SimpleNamespace(progressed=lambda step, report: pytest.fail("there is no report"))
    look = watching.feed("policy", tmp_path, watcher=watcher, ledger=ledger)
    for _ in range(5):
        look()
    assert sent == [("policy", [(0, 10)]), ("policy", [(10, 25)])]


def test_the_ledger_is_asked_no_oftener_than_every_few_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looked = [100.0], [0]

    def read_committed(scratch: Path) -> tuple[int, int]:
        looked[0] += 1
        return 1, 0

    monkeypatch.setattr(watching.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watching, "read_committed", read_committed)
    look = watching.feed("policy", tmp_path, watcher=None, ledger=None)  # type: ignore[arg-type]
    counts = []
    for now[0] in (100.0, 101.9, 102.0, 103.0, 104.1):
        look()
        counts.append(looked[0])
    assert counts == [1, 1, 2, 2, 3]
