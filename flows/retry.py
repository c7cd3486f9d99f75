"""Decides whether and how a step is retried after a failed attempt."""

from collections.abc import Mapping
from dataclasses import dataclass

from flows.attempts.jobs import work_of
from flows.attempts.micro_batches import remedy_for_memory, rows_per_pass, with_microbatch_size
from flows.exit_codes import ExitCode, may_be_retried, may_be_retried_once
from ledger.operations import StageOutcome
from schemas.recipe.recipe import ResolvedRecipe
from schemas.records.artifacts import Artifact
from schemas.records.attempt import AttemptOutcome

MAX_ATTEMPTS = 3
"""Most attempts at a step within one run; only some causes (a lost or preempted process) allow another."""


@dataclass(frozen=True)
class Retry:
    """The decision after a failed attempt."""

    status: StageOutcome
    """``resumable``: another attempt resumes; ``failed``: the user has to act."""
    remedy: str
    microbatch_size: int | None
    """Of the next attempt; None: the recipe's."""


class Retries:
    """Decides on retries in one run; it stores which were used."""

    def __init__(self, recipe: ResolvedRecipe) -> None:
        self._recipe = recipe
        self._retried_once: set[tuple[str, int]] = set()
        """(Step, exit code) of retries that are allowed only once."""

    def after(
        self,
        step: str,
        outcome: AttemptOutcome,
        *,
        microbatch_size: int | None,
        pass_rows: int | None,
        inputs: Mapping[str, Artifact],
    ) -> Retry:
        """The decision after a failed attempt.

        Args:
            step: the step.
            outcome: of the attempt, with its failure.
            microbatch_size: of the attempt; None: the recipe's.
            pass_rows: rows of the attempt's newest pass, which may be fewer, since a pass holds rows of like length; None:
                not known.
            inputs: role → artifact that the step reads.
        """
        failure = outcome.failure
        assert failure is not None, "asked only of an attempt that failed"
        if failure.cause == "cancelled":
            return Retry("failed", failure.remedy, microbatch_size)
        if not may_be_retried_once(failure.exit_code):
            status: StageOutcome = "resumable" if may_be_retried(failure.exit_code) else "failed"
            return Retry(status, failure.remedy, microbatch_size)
        was_retried = (step, failure.exit_code) in self._retried_once
        self._retried_once.add((step, failure.exit_code))
        place = f"goes on from step {outcome.committed_step}" if outcome.committed_step else "begins anew"
        next_attempt = f"attempt {(outcome.attempt or 0) + 1} {place}"
        if failure.exit_code != ExitCode.OUT_OF_MEMORY:
            if was_retried:
                return Retry("failed", failure.remedy, microbatch_size)
            return Retry("resumable", next_attempt, microbatch_size)
        rows = rows_per_pass(with_microbatch_size(work_of(self._recipe, step), microbatch_size), inputs)
        if rows is not None and pass_rows is not None:
            rows = min(rows, pass_rows)
        if was_retried or rows is None or rows < 2:
            return Retry("failed", remedy_for_memory(step, rows), microbatch_size)
        remedy = f"{next_attempt} with micro-batches of {rows // 2} in place of {rows}"
        return Retry("resumable", remedy, rows // 2)
