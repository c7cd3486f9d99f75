"""Whether a step is tried again after an attempt that failed, and in which way."""

from collections.abc import Mapping
from dataclasses import dataclass

from flows.attempts.jobs import work_of
from flows.attempts.micro_batches import in_micro_batches, remedy_for_memory, rows_at_once
from flows.exit_codes import ExitCode, has_second_chance, may_be_retried
from ledger.operations import StageOutcome
from schemas.recipe.recipe import ResolvedRecipe
from schemas.records.artifacts import Artifact
from schemas.records.attempt import AttemptOutcome

MAX_ATTEMPTS = 3
"""Attempts at a step within one run, while the cause of each end allows another (a lost or preempted process)."""


@dataclass(frozen=True)
class Retry:
    """What becomes of a step after a failed attempt."""

    status: StageOutcome
    """``resumable``: another attempt goes on; ``failed``: a person has to look."""
    remedy: str
    microbatch_size: int | None
    """Of the next attempt; None: as the recipe says."""


class Retries:
    """The decisions of one run, which remembers what it has tried."""

    def __init__(self, recipe: ResolvedRecipe) -> None:
        self._recipe = recipe
        self._given: set[tuple[str, int]] = set()
        """Steps that were begun again after an end that allows it once, with its exit code."""

    def after(
        self,
        step: str,
        outcome: AttemptOutcome,
        *,
        microbatch_size: int | None,
        inputs: Mapping[str, Artifact],
    ) -> Retry:
        """What to do after an attempt that failed.

        Args:
            step: what it was an attempt at.
            outcome: of the attempt, with its failure.
            microbatch_size: of the attempt; None: as the recipe says.
            inputs: role → artifact that the step reads.
        """
        failure = outcome.failure
        assert failure is not None, "asked only of an attempt that failed"
        if not has_second_chance(failure.exit_code):
            status: StageOutcome = "resumable" if may_be_retried(failure.exit_code) else "failed"
            return Retry(status, failure.remedy, microbatch_size)
        was_given = (step, failure.exit_code) in self._given
        self._given.add((step, failure.exit_code))
        place = f"goes on from step {outcome.committed_step}" if outcome.committed_step else "begins anew"
        next_attempt = f"attempt {(outcome.attempt or 0) + 1} {place}"
        if failure.exit_code != ExitCode.OUT_OF_MEMORY:
            if was_given:
                return Retry("failed", failure.remedy, microbatch_size)
            return Retry("resumable", next_attempt, microbatch_size)
        rows = rows_at_once(in_micro_batches(work_of(self._recipe, step), microbatch_size), inputs)
        if was_given or rows is None or rows < 2:
            return Retry("failed", remedy_for_memory(step, rows), microbatch_size)
        remedy = f"{next_attempt} with micro-batches of {rows // 2} in place of {rows}"
        return Retry("resumable", remedy, rows // 2)
