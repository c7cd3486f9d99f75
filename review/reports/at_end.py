"""The report of a run, made in a process of its own: drawn beside the last step, written when the run has ended.

Plots take seconds, and whatever goes wrong with them must not reach the run. So the run's process never draws: it starts
one that does, and waits for it when everything else is done.
"""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from vantage.attempts.identity.child_python import python_environment
from vantage.ledger.run_ledger import Ledger
from vantage.review.reports.files import REPORT
from vantage.runs.run import Run
from vantage.runs.watching import Watcher
from vantage.schemas.safe_text import safe_text

LONGEST_SECONDS = 120.0
"""Seconds after which the run ends without the report. It takes 3 s of a free core, and more on a busy machine."""

DRAW, WRITE = "draw", "write"
"""Words that the process reads, a line each: there is more to draw; the run's end is recorded."""
VARIABLE = "VANTAGE_REPORT"
"""Environment variable: with ``0``, runs make no report at their end; ``vantage report`` still makes one."""


def is_wanted() -> bool:
    """Return whether a run makes its report at its end."""
    return os.environ.get(VARIABLE) != "0"


class ReportProcess:
    """The process that makes the report of one run."""

    def __init__(self, run: Run) -> None:
        """Start the process. It draws what is recorded so far, and writes nothing before `write`."""
        self._record = run.record
        self._file = run.folder / REPORT
        environment = {**os.environ, **python_environment()}
        words = ["-m", "vantage.review.reports", run.record.run_id, run.workspace.address]
        self._process: subprocess.Popen[str] | None = None
        self._problem = ""
        try:
            self._process = subprocess.Popen(
                [sys.executable, *words],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C stops the last step, and the report shows that
            )
        except OSError as error:
            self._problem = str(error)

    def draw(self) -> None:
        """Let the process draw what is recorded so far, so that less is left for the end."""
        self._tell(DRAW)

    def write(self) -> None:
        """Let the process write the report, since the run's end is recorded."""
        self._tell(WRITE)

    def _tell(self, word: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # the process has failed, and `finish` reports why
                self._process.stdin.write(f"{word}\n")
                self._process.stdin.flush()

    def finish(self, ledger: Ledger, watcher: Watcher) -> Path | None:
        """Wait for the report and record it in the ledger; returns None, and prints a line for the reader, if there is none.

        Never raises for a report that could not be made.
        """
        problem = self._wait()
        if problem is None and self._file.is_file():
            ledger.log_report(self._file)
            return self._file
        watcher.say(
            f"  the report of the run could not be made ({safe_text(problem or 'it is missing')}); try again: "
            f"vantage report {self._record.run_id}",
            "yellow",
        )
        return None

    def _wait(self) -> str | None:
        """Wait for the process; return the reason why it failed, or None if it succeeded."""
        if self._process is None:
            return self._problem
        try:
            _, said = self._process.communicate(timeout=LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return f"it took more than {LONGEST_SECONDS:g} s"
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        return None if self._process.returncode == 0 else (lines or ["its process has ended"])[-1]
