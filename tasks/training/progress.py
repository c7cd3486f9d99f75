"""Report the progress of a running stage: one file that is always replaced whole, for anyone who reads it.

A stage's process has one ``Progress``. Code that samples, scores or updates reports its part of a step to it
by ``phase(name, done, total)``, wherever it is called; without a ``Progress`` nothing happens.
"""

import math
import threading
import time as clock
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import Field

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.fields import is_default
from vantage.storage.durable_files import replace_file_unsynced
from vantage.tasks.training.phase_seconds import of_process
from vantage.tasks.training.writer import writes_files

RUNNING = "running"
"""Name of the phase while a stage reports no other phase."""

SECONDS_BETWEEN_SHOWS = 0.2
SECONDS_OF_PACE, STEPS_OF_PACE = 60.0, 10
"""Seconds, or number, of the newest steps from which the remaining time is estimated, whichever are more."""


class StageProgress(Frozen):
    """Progress of a running stage."""

    phase: str
    """Present phase: ``running``, ``sampling``, ``scoring``, ``updating`` …"""
    phase_done: int = 0
    phase_total: int = 0
    """Size of the phase, of which ``phase_done`` is completed; both are 0 if they are not counted."""
    phase_note: str = ""
    """Detail that changes while ``phase_done`` does not: ``token 37 of 72``."""
    pass_rows: int | None = None
    """Rows of the newest pass; if memory ran out, that pass needed it. A pass of one row cannot be divided."""
    pass_tokens: int | None = None
    """Positions of the newest pass, counted like ``microbatch_tokens``."""
    step: int
    total: int
    """Last step of the stage, as far as it is known."""
    metrics: dict[str, float | None]
    """The newest metrics; None for one that is undefined (or not finite)."""
    headline: str | None = None
    """Name of the metric to show if there is room for only one."""
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    """Estimate until ``total``, from the newest steps; None before the first step and after the last."""
    firings: tuple[str, ...] = Field((), exclude_if=is_default(()))
    """The firings of the stage's guards, in words."""
    notices: tuple[str, ...] = Field((), exclude_if=is_default(()))
    """Sentences about the stage for a person; no guard has fired."""
    started: float
    """Start of this attempt, in seconds since 1970."""
    updated: float

    @property
    def value(self) -> float | None:
        """The headline metric's newest value."""
        return None if self.headline is None else self.metrics.get(self.headline)


class Progress:
    """Writes ``progress.json``: it is replaced whole, five times a second at most.

    A new stage-wide phase and the last step are always written. A thread writes phases within a step a moment later, so
    that the loop that reports them does not wait for the disk.
    """

    def __init__(self, path: Path, *, total: int, phase: str) -> None:
        """Write a first report, and receive the reports of this module's ``phase`` and ``within`` from now on.

        An earlier ``Progress`` of this process is closed, since two must not write the same file.
        """
        global _current
        end()
        self._path = path
        self._started = clock.time()
        self._shown_at = -math.inf
        self._phase = phase
        self._pace = Pace()
        self._showing = threading.Lock()
        self._later: threading.Timer | None = None
        self._closed = False
        self._most_tokens: dict[str, int] = {}
        self._report = StageProgress(
            phase=phase, step=0, total=total, metrics={}, started=self._started, updated=self._started
        )
        self._show()
        _current = self

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
        """Report the newest state; values that are not given stay unchanged."""
        before, phase_before = self._report, self._phase
        self._phase = phase_before if phase is None else phase
        finite = {
            name: value if value is not None and math.isfinite(value) else None
            for name, value in (before.metrics if metrics is None else metrics).items()
        }
        self._pace.mark(step, clock.monotonic())
        self._report = StageProgress(
            phase=self._phase,
            step=step,
            total=before.total if total is None else total,
            metrics=finite,
            headline=before.headline if headline is None else headline,
            tokens_per_second=before.tokens_per_second if tokens_per_second is None else tokens_per_second,
            pass_rows=before.pass_rows,
            pass_tokens=before.pass_tokens,
            firings=before.firings,
            notices=before.notices,
            started=self._started,
            updated=before.updated,
        )
        is_due = clock.monotonic() - self._shown_at >= SECONDS_BETWEEN_SHOWS
        if is_due or self._phase != phase_before or step >= self._report.total:
            self._show()

    def phase(self, name: str, done: int = 0, total: int = 0, *, note: str = "") -> None:
        """Report the present phase within the step, until the next ``update``; costs no more than an assignment."""
        self._report = self._report.model_copy(
            update={"phase": name, "phase_done": done, "phase_total": total, "phase_note": note}
        )
        self._show_soon()

    def watched(self, firings: tuple[str, ...]) -> None:
        """Report which guards have fired; shown at the end of the step."""
        self._report = self._report.model_copy(update={"firings": firings})

    def notice(self, text: str) -> None:
        """Report a sentence about the stage for a person."""
        self._report = self._report.model_copy(update={"notices": (*self._report.notices, text)})
        self._show_soon()

    def computing(self, rows: int, tokens: int) -> None:
        """Report how many rows and positions the next pass has.

        The largest pass of a phase is written at once: if there is too little memory for it, the kernel may end this process.
        """
        phase = self._report.phase
        self._report = self._report.model_copy(update={"pass_rows": rows, "pass_tokens": tokens})
        if tokens > self._most_tokens.get(phase, 0):
            self._most_tokens[phase] = tokens
            with suppress(OSError):
                self._show()
        else:
            self._show_soon()

    def close(self) -> None:
        """Write the pending report; nothing is written afterwards."""
        if self._later is not None:
            self._later.cancel()
            self._show_later()
        with self._showing:  # not in the middle of a report
            self._closed = True

    def _show_soon(self) -> None:
        if self._later is None:
            self._later = threading.Timer(SECONDS_BETWEEN_SHOWS, self._show_later)
            self._later.daemon = True
            self._later.start()

    def _show_later(self) -> None:
        self._later = None
        with suppress(OSError):  # a full disk is reported when the stage's own files are written
            self._show()

    def _show(self) -> None:
        with self._showing:
            if self._closed or not writes_files():
                return
            now = clock.monotonic()
            report = self._report
            left = self._pace.seconds_left(report.step, report.total, now)
            report = report.model_copy(update={"seconds_left": left, "updated": clock.time()})
            replace_file_unsynced(self._path, report.model_dump_json().encode())
            self._shown_at = now


class Pace:
    """Measures how long a step takes, from the newest steps."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()

    def mark(self, step: int, now: float) -> None:
        """Mark that step ``step`` begins at ``now`` (seconds of a monotonic clock).

        Time before the first step does not count, so the first mark moves as long as that step has not ended.
        """
        marks = self._marks
        if len(marks) > 1 and step == marks[-1][1]:
            return
        if marks and step <= marks[-1][1]:
            marks.clear()
        marks.append((now, step))
        while len(marks) > 2 and now - marks[1][0] > SECONDS_OF_PACE and step - marks[1][1] >= STEPS_OF_PACE:
            marks.popleft()

    def seconds_left(self, step: int, total: int, now: float) -> float | None:
        """Return seconds from ``now`` to step ``total``. None if no step has been measured, if none is left, or if the
        last step already takes longer than those before it, so that its end cannot be estimated.
        """
        if len(self._marks) < 2 or step >= total:
            return None
        (first_at, first), (last_at, last) = self._marks[0], self._marks[-1]
        seconds_a_step = (last_at - first_at) / (last - first)
        of_this_step = seconds_a_step - (now - last_at)
        if of_this_step < 0:  # the step takes longer than the mean; this is the pace if it ends now
            if step == total - 1:
                return None
            of_this_step, seconds_a_step = 0.0, (now - first_at) / (last - first + 1)
        return of_this_step + seconds_a_step * (total - step - 1)


_current: Progress | None = None
_within = ""


def phase(name: str, done: int = 0, total: int = 0, *, note: str = "") -> None:
    """Report the present phase of this process's stage, and how much of it is done."""
    of_process.enter(f"{_within}{name}")
    if _current is not None:
        _current.phase(f"{_within}{name}", done, total, note=note)


def computing(rows: int, tokens: int) -> None:
    """Report how many rows and positions the next pass of this process's stage has."""
    if _current is not None:
        _current.computing(rows, tokens)


def end() -> None:
    """Stop reporting: no later progress of this stage is shown."""
    global _current
    if _current is not None:
        _current.close()
        _current = None


@contextmanager
def within(name: str) -> Iterator[None]:
    """Prefix the names of all phases inside this block with ``name``: ``validation: sampling``."""
    global _within
    outside, _within = _within, f"{name}: "
    try:
        yield
    finally:
        _within = outside


@contextmanager
def outside() -> Iterator[None]:
    """Report the phases inside this block by their own names, even within ``within``, since they belong to the step."""
    global _within
    around, _within = _within, ""
    try:
        yield
    finally:
        _within = around


def read_progress(path: Path) -> StageProgress | None:
    """Return the newest report, or None if there is none (yet)."""
    try:
        return StageProgress.model_validate_json(path.read_bytes())
    except (FileNotFoundError, IsADirectoryError, ValueError):
        # A power loss can leave the file empty. It is only for display, so that is no reason to stop.
        return None
