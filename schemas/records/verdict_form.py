"""The form of a verifier's verdicts: right or wrong, one score, or several named ones. The dry run finds it for
good."""

from typing import Literal

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.fields import Name


class VerdictForm(Frozen):
    """The form that all verdicts of a verifier have."""

    kind: Literal["right_or_wrong", "score", "named_scores"] = "right_or_wrong"
    names: tuple[Name, ...] = ()
    """Names of the scores, sorted; empty unless they are named."""

    def __str__(self) -> str:
        """Return the form in words."""
        if self.kind == "named_scores":
            return f"scores named {', '.join(self.names)}"
        return {"right_or_wrong": "right or wrong", "score": "one number"}[self.kind]


RIGHT_OR_WRONG = VerdictForm()
