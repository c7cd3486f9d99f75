"""A question to a person, and the answer: whether a run goes on past a gate, or moves an alias."""

import hashlib
from datetime import UTC, datetime
from typing import Annotated

from pydantic import Field, StrictBool, StringConstraints

from vantage.schemas.canonical_json import canonical_json
from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.fields import is_unset
from vantage.schemas.records.artifacts import Digest
from vantage.schemas.records.milliseconds import LATEST
from vantage.schemas.records.verdicts import Verdict

PUBLISH_PREFIX = "publish:"
"""Prefix of the subject of a question about an alias: ``publish:NAME@ALIAS``."""

MAX_REASON = 2000
"""Most characters of a reason."""


class Question(Frozen):
    """A question to a person. The answer holds for exactly this artifact and these verdicts."""

    subject: str
    """A stage whose gate did not pass, or ``publish:NAME@ALIAS``."""
    stage: str
    """The stage that made the artifact."""
    stage_key: Digest
    digest: Digest
    """Content digest of the artifact."""
    verdicts: tuple[Verdict, ...]
    """The closed gates that ask; for an alias, all verdicts that it depends on."""

    @property
    def id(self) -> str:
        """sha256 of the question, equal only for equal questions."""
        return hashlib.sha256(canonical_json(self.model_dump(mode="json")).encode()).hexdigest()


class Approval(Frozen):
    """A person's answer to a question of a run. It is never changed."""

    question: Question
    run_id: str | None = Field(None, exclude_if=is_unset)
    """The run whose question it answers; None: an earlier version recorded it without the run."""
    approved: StrictBool
    """Whether the person approves; False: the person rejects."""
    by: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=200)]
    """Name that the deciding person gave."""
    login: str | None = Field(None, exclude_if=is_unset)
    """Login name of the process that recorded it; None: it came from Prefect's form."""
    reason: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=MAX_REASON)]
    """Reason of the decision."""
    time: Annotated[int, Field(ge=0, le=LATEST)]
    """Milliseconds since 1970."""

    @property
    def word(self) -> str:
        """``approved`` or ``rejected``."""
        return "approved" if self.approved else "rejected"

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.time / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
        as_login = "" if self.login in (None, self.by) else f" (login {self.login})"
        return f"{self.word} by {self.by}{as_login} on {when}: {self.reason}"


def answer_to(question: Question, approvals: tuple[Approval, ...]) -> Approval | None:
    """Return the answer to exactly this question."""
    return next((each for each in approvals if each.question == question), None)
