"""Decide whether and how a step is retried after a failed attempt."""

from collections import Counter
from dataclasses import dataclass

from vantage.attempts.exit_codes import ExitCode, may_be_retried, may_be_retried_once
from vantage.attempts.jobs import work_of
from vantage.attempts.micro_batches import remedy_for_memory
from vantage.ledger.operations import StageOutcome
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.recipe.stage import Stage
from vantage.schemas.records.attempt import AttemptOutcome

MAX_ATTEMPTS = 3
"""Most attempts at a step by one command; only some causes (a lost or preempted process) allow another."""


@dataclass(frozen=True)
class Retry:
    """The decision after a failed attempt."""

    status: StageOutcome
    """``resumable``: another attempt resumes; ``failed``: the user has to act."""
    remedy: str
    microbatch_tokens: int | None
    """Most tokens of the next attempt's micro-batches; None: the recipe's."""


class Retries:
    """Decides on retries in one run, and remembers which were used."""

    def __init__(self, recipe: ResolvedRecipe) -> None:
        self._recipe = recipe
        self._begun: Counter[str] = Counter()
        """Step → number of attempts that this process began."""
        self._retried_once: set[tuple[str, int]] = set()
        """(Step, exit code) of retries that are allowed only once."""

    def begins(self, step: str) -> None:
        """Count an attempt at the step."""
        self._begun[step] += 1

    def is_another_allowed(self, step: str) -> bool:
        """Return whether fewer than ``MAX_ATTEMPTS`` attempts at the step have begun."""
        return self._begun[step] < MAX_ATTEMPTS

    def after(
        self,
        step: str,
        outcome: AttemptOutcome,
        *,
        attempt: int | None,
        goes_on: bool,
        microbatch_tokens: int | None,
        pass_rows: int | None,
        pass_tokens: int | None,
    ) -> Retry:
        """Return the decision after a failed attempt.

        Args:
            step: the step.
            outcome: outcome of the attempt, with its failure.
            attempt: the number of the step's last attempt in run.json; None if none has begun.
            goes_on: whether this process starts the next attempt, if the failure allows one.
            microbatch_tokens: limit of this attempt; None: the recipe's.
            pass_rows: rows of the attempt's newest pass; None: it reported none.
            pass_tokens: positions of the same pass.
        """
        failure = outcome.failure
        assert failure is not None, "asked only of an attempt that failed"
        if failure.cause in ("cancelled", "time"):
            return Retry("failed", failure.remedy, microbatch_tokens)
        next_attempt = _next_attempt(outcome, attempt)
        if may_be_retried(failure.exit_code):
            return Retry("resumable", next_attempt if goes_on else failure.remedy, microbatch_tokens)
        if not may_be_retried_once(failure.exit_code):
            return Retry("failed", failure.remedy, microbatch_tokens)
        was_retried = (step, failure.exit_code) in self._retried_once
        self._retried_once.add((step, failure.exit_code))
        if not goes_on:
            next_attempt = f"run the same command again: {next_attempt}"
        if failure.exit_code != ExitCode.OUT_OF_MEMORY:
            if was_retried:
                return Retry("failed", failure.remedy, microbatch_tokens)
            return Retry("resumable", next_attempt, microbatch_tokens)
        work = work_of(self._recipe, step)
        if was_retried or pass_rows == 1 or not isinstance(work, Stage):
            remedy = remedy_for_memory(step, work, rows=pass_rows, tokens=pass_tokens)
            return Retry("failed", remedy, microbatch_tokens)
        if pass_tokens is None:  # the memory was not taken by a pass of the attempt
            return Retry("resumable", next_attempt, microbatch_tokens)
        half = pass_tokens // 2
        remedy = f"{next_attempt} with passes of at most {half} positions in place of {pass_tokens}"
        return Retry("resumable", remedy, half)


def _next_attempt(outcome: AttemptOutcome, attempt: int | None) -> str:
    """Return the text about the next attempt: its number, and the checkpoint that it goes on from; ``attempt``: the
    number of the last one in run.json."""
    number = outcome.attempt or attempt or 0
    if outcome.committed_step:
        return f"attempt {number + 1} goes on from step {outcome.committed_step}"
    if outcome.attempt is None and attempt is not None:  # only the next attempt reads a lost worker's steps
        return f"attempt {number + 1} goes on from its last checkpoint"
    return f"attempt {number + 1} begins anew"
