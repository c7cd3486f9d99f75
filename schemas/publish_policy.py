"""Policy on publishing: which keys must have signed a model, who may move an alias to it, and when keys are valid.

The policy belongs to the owner of the workspace and not to a recipe, since a recipe's author must not choose it.
"""

import re
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from vantage.schemas.frozen import Frozen, rule
from vantage.schemas.key_rules import KeyRule

Key = Annotated[str, Field(min_length=1, max_length=4096)]
"""A key's id, or the path of a public key, relative to the policy's folder."""
User = Annotated[str, Field(min_length=1, max_length=256)]


def _of(characters: str, words: str) -> AfterValidator:
    """Refuse a pattern with a character that no name has outside of ``[…]``: it would match nothing, and restrict nothing."""

    def check(pattern: str) -> str:
        plain = re.sub(r"\[!?\]?[^\]]*\]", "", pattern)
        strange = re.search(rf"[^*?{characters}]", plain)
        if strange is not None:
            raise ValueError(
                f"no name has {strange[0]!a}, so the pattern fits nothing and would hold nothing back; a name has {words}"
            )
        return pattern

    return AfterValidator(check)


_Text = Annotated[str, StringConstraints(min_length=1, max_length=256)]
ModelPattern = Annotated[_Text, _of("A-Za-z0-9._-", "letters of ASCII, digits, '.', '_' and '-'")]
"""A registered model, or a pattern with ``*``, ``?`` and ``[…]``."""
AliasPattern = Annotated[_Text, _of("a-z0-9-", "lower-case letters of ASCII, digits and '-'")]
"""An alias, or a pattern like that of a model."""


class AliasRule(Frozen):
    """Conditions under which an alias moves."""

    keys: tuple[Key, ...] | None = None
    """Each of these keys must have signed the model and everything that it was made from; None: no signature is required."""
    decision_keys: Annotated[tuple[Key, ...], Field(min_length=1)] | None = None
    """One of these keys must have signed each answer of a person and each loosened gate that the alias depends on, and
    each movement by a person; None: decisions need no signature."""
    users: tuple[User, ...] | None = None
    """Users of the operating system who may move the alias; empty: nobody; None: everybody."""

    loosened_gates: Literal["allow", "refuse"] = "allow"
    """``refuse``: the alias does not move if a gate of the model, of its evaluation or of their inputs closed on the same
    artifact in an earlier run, and the publishing run has made it less strict."""

    @rule
    def _holds_something_back(self) -> None:
        asks = self.users is not None or self.keys or self.decision_keys
        if not asks and self.loosened_gates == "allow":
            raise ValueError(
                "none of keys, decision_keys, users and loosened_gates: refuse is there, so it would hold nothing back; "
                "give one, or leave it out"
            )


class ModelRules(Frozen):
    """The rules of one registered model."""

    aliases: dict[AliasPattern, AliasRule]
    """Alias or pattern → its conditions. An alias that matches several must meet all of them; one that matches none is
    not restricted."""


class PublishPolicy(Frozen):
    """The whole file."""

    models: dict[ModelPattern, ModelRules]
    """Registered model or pattern → its rules. A model that matches none is not restricted; ``"*"`` matches all."""

    keys: dict[Key, KeyRule] = Field(default_factory=dict)
    """A key, as in ``keys`` of a rule → its period, and its revocation. Other keys are always valid."""

    def rules_for(self, model: str, alias: str) -> list[tuple[str, AliasRule]]:
        """Return path of the rule in the file → the rule, for each rule that the alias matches."""
        return [
            (f"models.{name}.aliases.{pattern}", found)
            for name, rules in self.models.items()
            if fnmatchcase(model, name)
            for pattern, found in rules.aliases.items()
            if fnmatchcase(alias, pattern)
        ]
