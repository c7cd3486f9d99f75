"""The kinds of reward term, one row a kind.

A new kind is its class here, a module in ``tasks.rewards`` that scores, and its row. A term
is of the kind whose field it gives: ``{model: reward}``, ``{verifier: arithmetic}``.
"""

from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ValidatorFunctionWrapHandler, WrapValidator

from schemas.frozen import Frozen, rule
from schemas.recipe.fields import Name, Number


class RewardTerm(Frozen):
    """One summand of a reward; each kind has a class of its own."""

    weight: Number = 1.0
    """What the summand is multiplied by."""

    @rule
    def _is_of_one_kind(self) -> None:
        if type(self) is RewardTerm:
            *others, last = (f"a {kind.field}" for kind in TERMS)
            raise ValueError(
                f"a reward term names either {', '.join(others)} or {last}; give exactly one of them"
            )

    @property
    def name(self) -> str:
        """What the term is called in metrics."""
        raise NotImplementedError

    @property
    def stage(self) -> str | None:
        """The stage whose artifact the term reads, if it reads one."""
        return None

    @property
    def asked(self) -> str | None:
        """The verifier that the term asks, if it asks one."""
        return None


class ModelTerm(RewardTerm):
    """A trained reward model's score."""

    model: Name
    """A reward_model stage, whose score is the summand."""
    verifier: None = None
    """Always empty: the name of a verifier in a term of that kind. It stands in the stage keys of all rewards."""
    wrong: Number = 0.0
    """Of a verifier's term; 0 here."""

    @rule
    def _no_right_and_wrong(self) -> None:
        if self.wrong:
            raise ValueError(
                f"wrong={self.wrong:g} is a verifier's score, and this term names a model; remove it"
            )

    @property
    def name(self) -> str:
        """The stage's."""
        return self.model

    @property
    def stage(self) -> str:
        """The stage that trained the model."""
        return self.model


class VerifierTerm(RewardTerm):
    """1 for a response that a verifier calls right."""

    model: None = None
    """Always empty: the stage of a reward model in a term of that kind. It stands in the stage keys of all rewards."""
    verifier: str
    """One of the recipe's ``verifiers``, or a built-in one (as ``verifier`` is everywhere)."""
    wrong: Number = 0.0
    """What a wrong response gets; a right one gets 1. VC-PPO and DAPO use −1."""

    @property
    def name(self) -> str:
        """The verifier's."""
        return self.verifier

    @property
    def asked(self) -> str:
        """The verifier."""
        return self.verifier


@dataclass(frozen=True, kw_only=True)
class TermKind:
    """What is known of one kind of term."""

    term: type[RewardTerm]
    """Its class."""
    field: str
    """The field that only this kind gives."""
    names: Literal["reward_model", "verifier"] | None = None
    """What the field names: a stage that makes a reward model, a verifier, or neither."""
    module: str
    """Of ``tasks.rewards``; its function ``load`` makes the scorer."""


TERMS = (
    TermKind(term=ModelTerm, field="model", names="reward_model", module="tasks.rewards.model_scores"),
    TermKind(term=VerifierTerm, field="verifier", names="verifier", module="tasks.rewards.verifier_scores"),
)
"""Every kind of reward term."""


def row_of(term: RewardTerm) -> TermKind:
    """The row of a term's kind."""
    return next(kind for kind in TERMS if kind.term is type(term))


def class_of(plain: Any) -> type[RewardTerm]:
    """The class of a term as it is written; ``RewardTerm``, which refuses itself, where that is not one kind's."""
    given = [kind.term for kind in TERMS if isinstance(plain, dict) and plain.get(kind.field) is not None]
    return given[0] if len(given) == 1 else RewardTerm


def _read(value: Any, handler: ValidatorFunctionWrapHandler) -> RewardTerm:
    if not isinstance(value, dict):
        return handler(value)  # type: ignore[no-any-return]
    term = class_of(value)
    if term is RewardTerm:  # the rule of its base tells what is missing, beside what else is wrong
        known = {name for kind in TERMS for name in kind.term.model_fields} - set(RewardTerm.model_fields)
        value = {name: given for name, given in value.items() if name not in known}
    return term.model_validate(value)


if TYPE_CHECKING:
    AnyTerm = RewardTerm
else:
    AnyTerm = Annotated[reduce(or_, (kind.term for kind in TERMS)), WrapValidator(_read)]
