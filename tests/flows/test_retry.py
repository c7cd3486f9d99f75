"""Each failed attempt has the right consequence, and its message names the remedy."""

from pathlib import Path
from typing import Any

import pytest

from vantage.attempts.exit_codes import ExitCode
from vantage.flows.retry import MAX_ATTEMPTS, Retries, Retry
from vantage.runs.resolving import load_resolved
from vantage.schemas.records.attempt import AttemptOutcome, Failure

AGAIN = "run the same command again"


@pytest.fixture
def retries(recipe_file: Path) -> Retries:
    return Retries(load_resolved(recipe_file)[0])


def after(
    retries: Retries,
    code: ExitCode,
    *,
    goes_on: bool,
    attempt: int | None = 1,
    known: int | None = 1,
    committed_step: int = 0,
) -> Retry:
    failure = Failure(exit_code=code, cause="killed", message="it was killed", remedy=AGAIN)
    outcome = AttemptOutcome(status="failed", failure=failure, attempt=attempt, committed_step=committed_step)
    return retries.after(
        "sft",
        outcome,
        attempt=known,
        goes_on=goes_on,
        microbatch_tokens=None,
        pass_rows=None,
        pass_tokens=None,
    )


@pytest.mark.parametrize("cause", ["time", "cancelled"])
def test_what_was_ended_on_purpose_is_not_tried_again_by_itself(retries: Retries, cause: Any) -> None:
    failure = Failure(exit_code=ExitCode.RESUME, cause=cause, message="its time has passed", remedy=AGAIN)
    retry = retries.after(
        "sft",
        AttemptOutcome(status="failed", failure=failure, attempt=1, committed_step=3),
        attempt=1,
        goes_on=True,
        microbatch_tokens=None,
        pass_rows=None,
        pass_tokens=None,
    )
    assert (retry.status, retry.remedy) == ("failed", AGAIN)


@pytest.mark.parametrize(
    "attempt, known, committed_step, follows",
    [
        (1, 1, 0, "attempt 2 begins anew"),
        (2, 2, 7, "attempt 3 goes on from step 7"),
        (None, 2, 0, "attempt 3 goes on from its last checkpoint"),
        (None, None, 0, "attempt 1 begins anew"),
    ],
    ids=["no checkpoint", "a checkpoint", "a lost worker", "never begun"],
)
def test_a_retried_attempt_names_the_next_one_and_asks_for_nothing(
    retries: Retries, attempt: int | None, known: int | None, committed_step: int, follows: str
) -> None:
    retry = after(
        retries,
        ExitCode.RESUME,
        goes_on=True,
        attempt=attempt,
        known=known,
        committed_step=committed_step,
    )
    assert retry == Retry("resumable", follows, None)


@pytest.mark.parametrize("code", [ExitCode.RESUME, ExitCode.HUNG, ExitCode.OUT_OF_MEMORY])
def test_the_last_attempt_of_a_command_asks_for_the_command_again(retries: Retries, code: ExitCode) -> None:
    retry = after(retries, code, goes_on=False)
    assert retry.status == "resumable"
    assert retry.remedy.startswith(AGAIN)


def test_attempts_are_counted_for_each_step(retries: Retries) -> None:
    for _ in range(MAX_ATTEMPTS - 1):
        retries.begins("sft")
    assert retries.is_another_allowed("sft")
    retries.begins("sft")
    assert not retries.is_another_allowed("sft")
    assert retries.is_another_allowed("reward")
