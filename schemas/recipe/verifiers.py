"""Verifiers: the rules that judge responses, and what counts as right for those that return scores."""

import re
from typing import Annotated

from pydantic import Field, StringConstraints, field_validator

from vantage.schemas.frozen import Frozen, rule
from vantage.schemas.recipe.fields import Name, Number, is_unset
from vantage.schemas.recipe.sources import Builtin, FileSource, file_source

EXACT_MATCH = str(Builtin("exact_match"))
"""Source of the verifier that compares a response with the row's answer."""


class Right(Frozen):
    """The responses that count as right for a verifier that returns scores."""

    at_least: Number
    """Least score of a right response, in the verifier's unit."""
    score: Name | None = None
    """Named score that decides, of a verifier that returns several; None: it returns one."""


class Verifier(Frozen):
    """A named rule that judges a response: a user's function, or a comparison with the answer."""

    source: str
    """A Python file (from the recipe's folder on), or a built-in verifier: ``builtin:exact_match``, ``builtin:number`` …"""
    function: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = "verify"
    """The file's function ``(prompt, response, answer)``; ``answer`` is None where the row has none. It returns a bool, a
    float, or ``{name: float}``, the same form for every row."""
    extract: str | None = None
    """A regular expression with one group, for ``builtin:exact_match``. The group's last match is compared with the
    row's answer; None: the whole response is compared."""
    right: Right | None = Field(None, exclude_if=is_unset)
    """The responses that count as right, for a verifier that returns scores, where a judge or ``positive_verifier`` asks for right or
    wrong."""

    @field_validator("extract")
    @classmethod
    def _one_group(cls, extract: str | None) -> str | None:
        if extract is None:
            return None
        try:
            groups = re.compile(extract).groups
        # RecursionError: groups nested too deeply; OverflowError: a repetition of too many
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{extract!r} is not a regular expression: {error}; correct it") from None
        if groups != 1:
            raise ValueError(
                f"{extract!r} has {groups} groups; put one pair of parentheses around what is compared with the answer "
                "((?:…) groups without counting)"
            )
        return extract

    @property
    def origin(self) -> FileSource:
        """Return what ``source`` names."""
        return file_source(self.source)

    @rule
    def _fields_fit_the_source(self) -> None:
        if self.source == EXACT_MATCH and self.function != "verify":
            raise ValueError(f"{EXACT_MATCH} has no function={self.function}; remove it")
        if self.source != EXACT_MATCH and self.extract is not None:
            raise ValueError(
                f"extract={self.extract!r} belongs to {EXACT_MATCH}; remove it, or let the file's function do it"
            )
