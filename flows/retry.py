"""Decides whether and how a step is retried after a failed attempt."""

from dataclasses import dataclass

from vantage.attempts.exit_codes import ExitCode, may_be_retried, may_be_retried_once
from vantage.attempts.jobs import work_of
from vantage.attempts.micro_batches import remedy_for_memory
from vantage.ledger.operations import StageOutcome
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.recipe.stage import Stage
from vantage.schemas.records.attempt import AttemptOutcome

MAX_ATTEMPTS = 3
"""Most attempts at a step within one run; only some causes (a lost or preempted process) allow another."""


@dataclass(frozen=True)
class Retry:
    """The decision after a failed attempt."""

    status: StageOutcome
    """``resumable``: another attempt resumes; ``failed``: the user has to act."""
    remedy: str
    microbatch_tokens: int | None
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
        microbatch_tokens: int | None,
        pass_rows: int | None,
        pass_tokens: int | None,
    ) -> Retry:
        """Return the decision after a failed attempt.

        Args:
            step: the step.
            outcome: of the attempt, with its failure.
            microbatch_tokens: of the attempt; None: the recipe's.
            pass_rows: of the attempt's newest pass; None: it told of none.
            pass_tokens: positions of the same pass.
        """
        failure = outcome.failure
        assert failure is not None, "asked only of an attempt that failed"
        if failure.cause == "cancelled":
            return Retry("failed", failure.remedy, microbatch_tokens)
        if not may_be_retried_once(failure.exit_code):
            status: StageOutcome = "resumable" if may_be_retried(failure.exit_code) else "failed"
            return Retry(status, failure.remedy, microbatch_tokens)
        was_retried = (step, failure.exit_code) in self._retried_once
        self._retried_once.add((step, failure.exit_code))
        place = f"goes on from step {outcome.committed_step}" if outcome.committed_step else "begins anew"
        next_attempt = f"attempt {(outcome.attempt or 0) + 1} {place}"
        if failure.exit_code != ExitCode.OUT_OF_MEMORY:
            if was_retried:
                return Retry("failed", failure.remedy, microbatch_tokens)
            return Retry("resumable", next_attempt, microbatch_tokens)
        work = work_of(self._recipe, step)
        if was_retried or pass_rows == 1 or not isinstance(work, Stage):
            remedy = remedy_for_memory(step, work, rows=pass_rows, tokens=pass_tokens)
            return Retry("failed", remedy, microbatch_tokens)
        if pass_tokens is None:  # no pass of its own took the memory
            return Retry("resumable", next_attempt, microbatch_tokens)
        half = pass_tokens // 2
        remedy = f"{next_attempt} with passes of at most {half} positions in place of {pass_tokens}"
        return Retry("resumable", remedy, half)
