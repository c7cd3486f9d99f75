"""How far a running stage has come: one file, replaced whole, for whoever takes a glance."""

import math
import time as clock
from collections.abc import Mapping
from pathlib import Path

from schemas.frozen import Frozen
from tasks.storage.durable_files import show_file

SECONDS_BETWEEN_SHOWS = 0.2


class StageProgress(Frozen):
    """How far a running stage has come."""

    phase: str
    """What it does now: ``training``, ``validating`` …"""
    step: int
    total: int
    """The step at which the stage ends, as far as it knows."""
    metrics: dict[str, float | None]
    """The newest metrics; None where one is undefined (or not finite)."""
    headline: str | None = None
    """The name of the one metric to show where there is room for one."""
    tokens_per_second: float | None = None
    started: float
    """Seconds since 1970, of this attempt."""
    updated: float

    @property
    def value(self) -> float | None:
        """The headline metric's newest value."""
        return None if self.headline is None else self.metrics.get(self.headline)


class Progress:
    """The writer's end of ``progress.json``: replaced whole, five times a second at most.

    A new phase and the last step are always written.
    """

    def __init__(self, path: Path, *, total: int, phase: str) -> None:
        self._path = path
        self._started = clock.time()
        self._shown_at = -math.inf
        self._report = StageProgress(
            phase=phase, step=0, total=total, metrics={}, started=self._started, updated=self._started
        )
        self._show()

    def update(
        self,
        step: int,
        *,
        metrics: Mapping[str, float | None] | None = None,
        headline: str | None = None,
        tokens_per_second: float | None = None,
        phase: str | None = None,
        total: int | None = None,
    ) -> None:
        """Tell the newest state; what is not given stays as it was."""
        before = self._report
        finite = {
            name: value if value is not None and math.isfinite(value) else None
            for name, value in (before.metrics if metrics is None else metrics).items()
        }
        self._report = StageProgress(
            phase=before.phase if phase is None else phase,
            step=step,
            total=before.total if total is None else total,
            metrics=finite,
            headline=before.headline if headline is None else headline,
            tokens_per_second=before.tokens_per_second if tokens_per_second is None else tokens_per_second,
            started=self._started,
            updated=clock.time(),
        )
        is_due = clock.monotonic() - self._shown_at >= SECONDS_BETWEEN_SHOWS
        if is_due or self._report.phase != before.phase or step >= self._report.total:
            self._show()

    def _show(self) -> None:
        show_file(self._path, self._report.model_dump_json().encode())
        self._shown_at = clock.monotonic()


def read_progress(path: Path) -> StageProgress | None:
    """The newest report, or None where there is none (yet)."""
    try:
        return StageProgress.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValueError):
        # A power loss can leave it empty. It is only for show, so that is no reason to stop.
        return None
