"""The interface of a launcher, which runs the computation of a stage."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from vantage.schemas.records.attempt import RUN_STAGE, Failure, Share
from vantage.schemas.records.job import StageJob, StageResult


class StageFailed(Exception):
    """A computation has ended without a result."""

    def __init__(self, failure: Failure, *, log: Path) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.log = log

    def __str__(self) -> str:
        return f"{self.failure.message}; {self.failure.remedy} ({self.log})"


class Launcher(Protocol):
    """Starts the computation of one attempt, waits for it, and returns its result.

    Vantage has one, ``vantage.attempts.launchers.local_process.LocalProcess``: a child process of this machine. It starts the
    ranks of a stage with torchrun, or with Ray if the stage has several nodes. Tests pass launchers of their own.
    """

    def launch(
        self,
        job: StageJob,
        *,
        log: Path,
        share: Share | None = None,
        stop: threading.Event | None = None,
        on_poll: Callable[[], None] | None = None,
        function: str = RUN_STAGE,
        hang_seconds: float | None = None,
    ) -> StageResult:
        """Compute ``job`` and wait for it.

        Args:
            job: the job, whose folders must be accessible where the computation runs.
            log: file to which all output is appended.
            share: CPUs and GPUs to use; None: all of the machine's.
            stop: when set, the computation is asked to save its state and end.
            on_poll: called a few times a second, in the calling thread.
            function: dotted name of the function ``StageJob -> StageResult``.
            hang_seconds: seconds without a progress report after which the computation is killed; None: never.

        Raises:
            StageFailed: the computation ended without a result.
        """
