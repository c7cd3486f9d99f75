"""The kinds of reward term, one row per kind.

A new kind is its class here, its row, and a module in ``vantage.tasks.rewards`` that scores. The field that a term has
decides its kind: ``{model: reward}``, ``{verifier: arithmetic}``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationInfo, ValidatorFunctionWrapHandler, WrapValidator

from vantage.schemas.frozen import rule
from vantage.schemas.recipe.fields import MAX_NAMED, Count, Name, Number, is_default, is_unset
from vantage.schemas.recipe.judging_models import JudgingModel
from vantage.schemas.recipe.score_rules import ScoreRule
from vantage.schemas.recipe.served_scores import JudgeServer, RewardServer, Served
from vantage.schemas.recipe.step_ends import StepEnds


class RewardTerm(ScoreRule):
    """One term of a reward; each kind has its own class."""

    weight: Number = 1.0
    """The term's factor in the sum."""

    @rule
    def _is_of_one_kind(self) -> None:
        if type(self) is RewardTerm:
            *others, last = dict.fromkeys(kind.called or f"a {kind.field}" for kind in TERMS)
            raise ValueError(
                f"a reward term names either {', '.join(others)} or {last}; give exactly one of them"
            )

    @property
    def name(self) -> str:
        """Name of the term in metrics: the value of its kind's field."""
        return str(getattr(self, row_of(self).field))

    @property
    def score_names(self) -> tuple[str, ...]:
        """Names of its scores in curves, as far as the recipe gives them: the term's, or ``TERM.NAME`` for each named one."""
        return (self.name,)

    def may_have_score(self, name: str) -> bool:
        """Return whether a score may have this name in curves. What a verifier returns is known after its dry run."""
        return name in self.score_names

    @property
    def is_shaped(self) -> bool:
        """Whether a setting changes the score before it is added."""
        return (
            self.clip is not None
            or bool(self.offset)
            or self.whiten
            or getattr(self, "step_ends", None) is not None
        )

    @property
    def stage(self) -> str | None:
        """The stage, or the other model, whose scores the term reads; None: none."""
        return None

    @property
    def verifier_name(self) -> str | None:
        """The verifier that scores the term; None: none."""
        return None

    @property
    def server(self) -> Served | None:
        """The server that scores the term; None: none."""
        return None

    @property
    def judging_model(self) -> JudgingModel | None:
        """The language model of the run that scores the term; None: none."""
        return None


class SteppedTerm(RewardTerm):
    """A term that may score each step of a response, in place of the whole."""

    step_ends: StepEnds | None = Field(None, exclude_if=is_unset)
    """Where steps end: each of them is rewarded at its last token by the score of the response up to there, clipped, moved and
    weighted. None: the whole response has one score, at its end."""

    @rule
    def _steps_are_not_whitened(self) -> None:
        if self.step_ends is not None and self.whiten:
            raise ValueError(
                "whiten is over whole responses, and step_ends scores each step; leave one of them out"
            )


class ModelTerm(SteppedTerm):
    """The score of a trained reward model."""

    model: Name
    """The reward_model stage whose score is the term, or one of ``models``: a reward model that was trained elsewhere. If its
    tokenizer or chat template is another than the policy's, it reads the text of prompts and responses in its own."""
    verifier: None = None
    """Always null in this kind of term; it is part of stage keys."""
    wrong: Number = 0.0
    """Always 0 in this kind of term; it is part of stage keys."""

    @rule
    def _wrong_needs_a_verifier(self) -> None:
        if self.wrong:
            raise ValueError(
                f"wrong={self.wrong:g} is a verifier's score, and this term names a model; remove it"
            )

    @property
    def stage(self) -> str:
        """The stage that trained the model, or another model's name."""
        return self.model


class NamedScoresTerm(RewardTerm):
    """A term whose source may give several named scores; each of them counts by a rule of its own."""

    scores: dict[Name, ScoreRule] = Field(
        default_factory=dict, max_length=MAX_NAMED, exclude_if=is_default({})
    )
    """Name → its weight, clip and offset, for a source that gives named scores: all of them, or none. The term is
    weight · Σ of them. Left out: each named score counts with weight 1."""

    @rule
    def _named_scores_have_rules_of_their_own(self) -> None:
        if self.scores and (self.clip is not None or self.offset or self.whiten):
            raise ValueError(
                "clip, offset and whiten apply to one score, and this term has several; give them to a name under scores"
            )

    @property
    def named(self) -> tuple[str, ...]:
        """The names of its scores, as far as the recipe gives them; empty: it has one score, or the recipe does not say."""
        return tuple(self.scores)

    @property
    def score_names(self) -> tuple[str, ...]:
        """Names of its scores in curves, as far as the recipe gives them: the term's, or ``TERM.NAME`` for each named one."""
        return names_in_curves(self.name, self.named)

    def rule_of(self, name: str) -> ScoreRule:
        """Return the rule by which a named score counts in the whole sum."""
        own = self.scores.get(name, ScoreRule())
        return own.model_copy(update={"weight": self.weight * own.weight})


class VerifierTerm(NamedScoresTerm, SteppedTerm):
    """A term that is a verifier's score: 1 for a response that it accepts, or the number or numbers that it returns."""

    model: None = None
    """Always null in this kind of term; it is part of stage keys."""
    verifier: str
    """One of the recipe's ``verifiers``, or a built-in one."""
    wrong: Number = 0.0
    """Score of a wrong response, for a verifier that returns right or wrong; a right one scores 1. VC-PPO and DAPO use
    −1."""

    @rule
    def _named_scores_of_steps_are_not_whitened(self) -> None:
        whitened = [name for name, each in self.scores.items() if each.whiten]
        if self.step_ends is not None and whitened:
            raise ValueError(
                f"scores.{whitened[0]}.whiten is over whole responses, and step_ends scores each step; leave one of them out"
            )

    @property
    def verifier_name(self) -> str:
        """The verifier."""
        return self.verifier

    def may_have_score(self, name: str) -> bool:
        """Return whether a score may have this name in curves. What a verifier returns is known after its dry run."""
        return super().may_have_score(name) or (not self.scores and name.startswith(f"{self.name}."))


class AnsweredTerm(NamedScoresTerm):
    """A term whose scores are read from stored answers."""

    @property
    def answering(self) -> Served | JudgingModel:
        """The server or the model that answers."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Its name in the recipe."""
        return self.answering.name

    @property
    def named(self) -> tuple[str, ...]:
        """The names of its scores; empty: it has one score."""
        return self.answering.score_names

    @rule
    def _rules_are_of_the_servers_scores(self) -> None:
        names = self.answering.score_names
        if names and (self.clip is not None or self.offset or self.whiten):
            raise ValueError(
                f"clip, offset and whiten apply to one score, and this term has {', '.join(names)}; give them to a name under scores"
            )
        if not self.scores:
            return
        if not names:
            raise ValueError(
                f"scores names {', '.join(self.scores)}, and the term has one score without a name; leave scores out"
            )
        if unknown := [name for name in self.scores if name not in names]:
            raise ValueError(
                f"scores names {', '.join(unknown)}, and the term has {', '.join(names)}; correct the names"
            )
        if unnamed := [name for name in names if name not in self.scores]:
            raise ValueError(
                f"scores has no {', '.join(unnamed)}; add it, with weight: 0 if it is only recorded"
            )


class ServedTerm(AnsweredTerm):
    """A term whose scores a server gives."""

    @property
    def server(self) -> Served:
        """The server."""
        raise NotImplementedError

    @property
    def answering(self) -> Served:
        """The server."""
        return self.server


class JudgeTerm(ServedTerm):
    """The score, or the scores, of a language model at a server that judges each response."""

    judge: JudgeServer
    """The model, its server and the question."""

    @property
    def server(self) -> Served:
        """The judge."""
        return self.judge


class JudgingModelTerm(AnsweredTerm):
    """The score, or the scores, of a language model of the run that judges each response."""

    judge: JudgingModel
    """The model and the question."""

    @property
    def judging_model(self) -> JudgingModel:
        """The judge."""
        return self.judge

    @property
    def answering(self) -> JudgingModel:
        """The judge."""
        return self.judge


class HttpTerm(ServedTerm):
    """The score, or the scores, that a reward server computes."""

    http: RewardServer
    """The server."""

    @property
    def server(self) -> Served:
        """The server."""
        return self.http


class LengthPenalty(RewardTerm):
    """A term that is lower for longer responses, counted in tokens, their end-of-sequence token included."""

    length: Literal["linear", "overlong", "relative"]
    """``linear``: −length/limit. ``overlong``: 0, and over the buffer before the limit down to −1 (DAPO, arXiv 2503.14476 eq.
    13). ``relative``: from 1/2 for the shortest down to −1/2 for the longest response to the prompt that is scored with it, 0
    if all are equal (Kimi k1.5, arXiv 2501.12599 §2.3.3, for wrong responses too)."""
    limit: Count | None = None
    """Length in tokens that the penalty is relative to; None: ``generation.max_response_tokens``. Not for ``relative``."""
    buffer: Annotated[float, Field(gt=0.0, le=1.0, strict=True)] | None = None
    """Share of the limit at its end over which ``overlong`` goes down (DAPO: 0.2)."""

    @rule
    def _fields_fit_the_penalty(self) -> None:
        if (self.buffer is None) == (self.length == "overlong"):
            remedy = "give one, DAPO's is 0.2" if self.buffer is None else "leave it out"
            raise ValueError(
                f"buffer belongs to length: overlong, and this is length: {self.length}; {remedy}"
            )
        if self.limit is not None and self.length == "relative":
            raise ValueError(
                f"limit={self.limit} is not read by length: relative, which compares responses to one prompt; leave it out"
            )

    @property
    def name(self) -> str:
        """Name of the term in metrics."""
        return f"length_{self.length}"


@dataclass(frozen=True, kw_only=True)
class TermKind:
    """One row: a kind of term."""

    term: type[RewardTerm]
    """Its class."""
    field: str
    """The field that only this kind has."""
    names: Literal["reward_model", "verifier"] | None = None
    """The meaning of the field: a stage that makes a reward model, a verifier, or neither."""
    module: str
    """Dotted name of its module in ``vantage.tasks.rewards``, whose function ``load`` makes the scorer."""
    shapes: bool = False
    """Whether it shapes the score of responses that are equally good. A group whose other terms are all equal is uniform."""
    called: str = ""
    """Its name in messages, where that is not the field's."""
    has_url: bool | None = None
    """Whether the field's value names the address of a server, where two kinds have the same field; None: no other kind has it."""

    def is_of(self, plain: Mapping[str, Any]) -> bool:
        """Return whether a term in plain form has the field of this kind."""
        given = plain.get(self.field)
        if given is None or self.has_url is None:
            return given is not None
        names_url = "url" in given if isinstance(given, Mapping) and given else True
        return names_url == self.has_url


TERMS = (
    TermKind(
        term=ModelTerm, field="model", names="reward_model", module="vantage.tasks.rewards.model_scores"
    ),
    TermKind(
        term=VerifierTerm, field="verifier", names="verifier", module="vantage.tasks.rewards.verifier_scores"
    ),
    TermKind(term=JudgeTerm, field="judge", module="vantage.tasks.rewards.judge_scores", has_url=True),
    TermKind(
        term=JudgingModelTerm,
        field="judge",
        module="vantage.tasks.rewards.judging_model_scores",
        has_url=False,
    ),
    TermKind(
        term=HttpTerm,
        field="http",
        module="vantage.tasks.rewards.http_scores",
        called="a reward server (http)",
    ),
    TermKind(
        term=LengthPenalty, field="length", module="vantage.tasks.rewards.length_penalties", shapes=True
    ),
)
"""Every kind of reward term."""


def names_in_curves(term: str, named: Iterable[str]) -> tuple[str, ...]:
    """Return the names of a term's scores in curves: ``TERM.NAME`` for each named one, or the term's if it has a single score."""
    return tuple(f"{term}.{name}" for name in named) or (term,)


def row_of(term: RewardTerm) -> TermKind:
    """Return the row of a term's kind."""
    return next(kind for kind in TERMS if kind.term is type(term))


def class_of(plain: Any) -> type[RewardTerm]:
    """Return the class of a term in plain form; ``RewardTerm``, which is always invalid, if the kind is not clear."""
    given = [kind.term for kind in TERMS if isinstance(plain, dict) and kind.is_of(plain)]
    return given[0] if len(given) == 1 else RewardTerm


def _read(value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> RewardTerm:
    if not isinstance(value, dict):
        return handler(value)  # type: ignore[no-any-return]
    term = class_of(value)
    if term is RewardTerm:  # the base's rule reports what is missing, together with other problems
        known = {name for kind in TERMS for name in kind.term.model_fields} - set(RewardTerm.model_fields)
        value = {name: given for name, given in value.items() if name not in known}
    return term.model_validate(value, context=info.context)


if TYPE_CHECKING:
    AnyTerm = RewardTerm
else:
    AnyTerm = Annotated[reduce(or_, (kind.term for kind in TERMS)), WrapValidator(_read)]
