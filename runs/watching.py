"""Pass on reports of a running stage: progress to the watcher, metrics to the ledger."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from vantage.ledger.journal import Entry, read
from vantage.ledger.run_ledger import Ledger
from vantage.runs.record import StageRecord
from vantage.tasks.training.progress import StageProgress, read_progress
from vantage.tasks.training.scratch import JOURNAL, PROGRESS, read_committed

SECONDS_BETWEEN_METRICS = 2.0
PAGE_AT = "  Prefect shows it at "
"""Beginning of the line with the address of a run's page."""


class Watcher(Protocol):
    """Displays a run; called from the threads of several stages at once."""

    def say(self, text: str, style: str = "") -> None:
        """Print a line that is not about progress."""

    def started(self, step: str, attempt: int) -> None:
        """Report that a stage's computation begins."""

    def progressed(self, step: str, report: StageProgress) -> None:
        """Report that a running stage has made progress."""

    def ended(self, step: str, stage: StageRecord) -> None:
        """Report that a stage has ended, with or without an artifact."""


def feed(step: str, scratch: Path, *, watcher: Watcher, ledger: Ledger) -> Callable[[], None]:
    """Return a function to call a few times a second while the step runs.

    The ledger gets the journal only up to the newest committed checkpoint: later steps may be computed again.
    """
    sent, due = 0, 0.0

    def look() -> None:
        nonlocal sent, due
        report = read_progress(scratch / PROGRESS)
        if report is not None:
            watcher.progressed(step, report)
        if time.monotonic() >= due:
            due = time.monotonic() + SECONDS_BETWEEN_METRICS
            _, committed = read_committed(scratch)
            if committed > sent:
                ledger.send_metrics(step, journal_entries(scratch, start=sent, end=committed))
                sent = committed

    return look


def journal_entries(scratch: Path, *, start: int = 0, end: int | None = None) -> list[Entry]:
    """Return the entries of a stage's metric journal between two offsets; empty if the stage has no curves."""
    path = scratch / JOURNAL
    return list(read(path, start, end)) if path.exists() else []
