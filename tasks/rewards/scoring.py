"""Score responses by a recipe's reward: the weighted sum of its terms."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module

import torch
from torch import Tensor

from vantage.algorithms.ensembles import combined
from vantage.algorithms.rewards import replace_missing_eos, subtract_missing_eos, whiten_scores
from vantage.algorithms.score_distribution import quantiles
from vantage.models.sequences import Sequences
from vantage.schemas.conversations import Message
from vantage.schemas.metric_names import TERM_PERCENTILES
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rewards import Ensemble, MissingEos
from vantage.schemas.recipe.score_rules import ScoreRule
from vantage.schemas.recipe.terms import NamedScoresTerm, RewardTerm, names_in_curves, row_of
from vantage.schemas.records.job import StageJob
from vantage.tasks.rewards.step_scores import StepRewards, StepScores, step_rewards
from vantage.tasks.rewards.term_scores import NamedScores, Responses, Source, TermScores, counted_scores


@dataclass(frozen=True)
class Term:
    """One loaded term of a reward, with one score or several named ones."""

    name: str
    weight: float
    scores: TermScores | NamedScores | StepScores
    is_model: bool = False
    """Whether a reward model scores the whole response."""
    shapes: bool = False
    """Whether the term shapes the score of responses that are equally good."""
    rules: tuple[ScoreRule, ...] = ()
    """The rule of the term's score, or of each named score, in that order; empty: only the weight applies."""

    @property
    def is_graded(self) -> bool:
        """Whether the scores are numbers from a verifier or a server, and not 1 and 0."""
        return isinstance(self.scores, NamedScores) or getattr(self.scores, "is_graded", False)

    @property
    def score_names(self) -> tuple[str, ...]:
        """The names of the scores in curves: the term's name, or ``TERM.NAME`` for each named score."""
        return names_in_curves(self.name, names_of(self.scores))

    def score(self, given: Responses) -> dict[str, Tensor]:
        """Return each score's name in curves → scores (B,), unclipped and unweighted."""
        assert not isinstance(self.scores, StepScores)  # ``step_rewards`` scores terms with steps
        if not isinstance(self.scores, NamedScores):
            return {self.name: self.scores(given)}
        return dict(zip(self.score_names, self.scores.scores(given).unbind(dim=1), strict=True))

    def summands(self, by_score: Mapping[str, Tensor]) -> list["Summand"]:
        """Return the parts of the weighted sum, one for each of the term's scores (B,)."""
        rules = self.rules or (ScoreRule(weight=self.weight),)
        return [
            Summand(rule.weight, counted_scores(by_score[name], rule), shapes=self.shapes, whiten=rule.whiten)
            for name, rule in zip(self.score_names, rules, strict=True)
        ]


@dataclass(frozen=True)
class Scorer:
    """A loaded reward."""

    terms: tuple[Term, ...]
    missing_eos: MissingEos | None
    ensemble: Ensemble | None = None
    members: tuple[str, ...] = ()
    """Names of the terms that the ensemble combines."""

    @property
    def graded(self) -> tuple[str, ...]:
        """Names of the scores that are numbers from a verifier or a server."""
        return tuple(name for term in self.terms if term.is_graded for name in term.score_names)

    @property
    def score_names(self) -> tuple[str, ...]:
        """Names of all scores, as ``Scores.by_term`` has them."""
        return tuple(name for term in self.terms for name in term.score_names)


@dataclass(frozen=True)
class Summand:
    """One part of a reward's weighted sum."""

    weight: float
    scores: Tensor
    """(B,), clipped and moved by the rule of the score."""
    shapes: bool = False
    """Whether this part shapes the score of responses that are equally good, as a length penalty does."""
    whiten: bool = False
    """Whether this part is whitened over each rollout that the policy learns from."""


@dataclass(frozen=True)
class Scores:
    """Scores (B,) of whole responses, before any scaling and KL."""

    total: Tensor
    """The weighted sum of the terms, with the missing-EOS rule applied."""
    weighted_sum: Tensor
    """The weighted sum without the missing-EOS rule and without length penalties; it shows whether all responses of a
    group are equally right."""
    by_term: dict[str, Tensor]
    """Term → scores; ``TERM.NAME`` for each named score of a term that has several."""
    graded: tuple[str, ...] = ()
    """Scores of a verifier that returns numbers; their spread is reported too."""
    summands: tuple[Summand, ...] = ()
    """The parts of the weighted sum; none, for collected responses."""
    steps: Tensor | None = None
    """(B,T): the part of the total that is rewarded at the ends of steps; None: the whole total is rewarded at the
    end."""

    def learned(self) -> Tensor:
        """Return the scores (B,) that the policy learns from: the total, with whitened parts if a rule asks for
        them."""
        total = self.total
        for each in self.summands:
            if each.whiten:
                total = total + each.weight * (whiten_scores(each.scores) - each.scores)
        return total

    def select(self, rows: Tensor, *, width: int) -> "Scores":
        """Return the scores at ``rows``, in that order; ``width``: tokens of their longest response."""
        return Scores(
            total=self.total[rows],
            weighted_sum=self.weighted_sum[rows],
            by_term={name: term[rows] for name, term in self.by_term.items()},
            graded=self.graded,
            summands=tuple(replace(each, scores=each.scores[rows]) for each in self.summands),
            steps=None if self.steps is None else self.steps[rows, :width],
        )


def load_scorer(
    job: StageJob,
    reward: str,
    *,
    tokenizers_of: Sequence[str],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Scorer:
    """Load the models and verifiers of the reward's terms.

    Args:
        tokenizers_of: roles of the policies whose ids the reward models will read.
        dtype: type of the models' trunks.

    Raises:
        TokenizersDiffer, UnreadablePrompt, BrokenVerifier, MissingAnswers: see the terms' modules.
    """
    terms = []
    for index, term in enumerate(job.rewards[reward].terms):
        source = Source(
            job,
            f"reward.{reward}.{index}",
            f"rewards.{reward}.terms.{index}",
            tuple(tokenizers_of),
            device,
            dtype,
        )
        scores = _load(term, source)
        names = names_of(scores)
        rules = (
            tuple(term.rule_of(name) for name in names)
            if names and isinstance(term, NamedScoresTerm)
            else (term,)
        )
        terms.append(
            Term(
                term.name,
                term.weight,
                scores,
                is_model=term.stage is not None and not isinstance(scores, StepScores),
                shapes=row_of(term).shapes,
                rules=rules,
            )
        )
    whole = job.rewards[reward]
    return Scorer(tuple(terms), whole.missing_eos, ensemble=whole.ensemble, members=whole.members)


def _load(term: RewardTerm, source: Source) -> TermScores | NamedScores | StepScores:
    loaded: TermScores | NamedScores | StepScores = import_module(row_of(term).module).load(term, source)
    return loaded


def names_of(scores: TermScores | NamedScores | StepScores) -> tuple[str, ...]:
    """Return the names of a term's scores; none: it has one score without a name."""
    return scores.names if isinstance(scores, NamedScores | StepScores) else ()


@torch.no_grad()
def score(
    scorer: Scorer,
    sequences: Sequences,
    *,
    prompts: Sequence[str],
    responses: Sequence[str],
    answers: Sequence[str | None],
    ended: Tensor,
    limits: PassLimits,
    conversations: Sequence[list[Message] | None] | None = None,
) -> Scores:
    """Score a batch.

    Args:
        ended: (B,) True where the response ended with its end-of-sequence token.
        conversations: turns of prompts that are conversations; None: no prompt is one.
    """
    given = Responses(sequences, prompts, responses, answers, ended.device, limits, ended, conversations)
    by_term, of_steps = scores_of(scorer, given), steps_of(scorer, given)
    by_term |= {name: found.plain for name, found in of_steps.items()}
    steps = [
        Summand(rule.weight, of_steps[name].counted)
        for term in stepped_terms(scorer)
        for name, rule in zip(term.score_names, term.rules, strict=True)
    ]
    summands = (
        *summands_of(by_term, scorer),
        *(replace(each, scores=each.scores.sum(dim=1)) for each in steps),
    )
    total = sum_of(summands)
    return Scores(
        total=apply_missing_eos(total, ended, scorer.missing_eos),
        weighted_sum=sum_of([each for each in summands if not each.shapes] or summands),
        by_term=by_term,
        graded=scorer.graded,
        summands=summands,
        steps=sum_of(steps) if steps else None,
    )


def score_metrics(
    scores: Scores, names: Collection[str] | None = None, *, prefix: str = ""
) -> dict[str, float]:
    """Return the mean of each term's or named score, unweighted, and percentiles of the graded ones.

    Args:
        names: names of the scores; None: all.
        prefix: prefix of the metrics' names.
    """
    of = {name: each for name, each in scores.by_term.items() if names is None or name in names}
    means = {f"{prefix}score_mean_{name}": each.mean().item() for name, each in of.items()}
    spread = {
        f"{prefix}score_p{percent}_{name}": value
        for name in scores.graded
        if name in of
        for percent, value in zip(
            TERM_PERCENTILES,
            quantiles(of[name], [percent / 100 for percent in TERM_PERCENTILES]),
            strict=True,
        )
    }
    return means | spread


def scores_of(scorer: Scorer, given: Responses) -> dict[str, Tensor]:
    """Return the scores (B,) of the terms that score whole responses, as ``Scores.by_term`` has them."""
    terms = [term for term in scorer.terms if not isinstance(term.scores, StepScores)]
    return {name: scores for term in terms for name, scores in term.score(given).items()}


def steps_of(scorer: Scorer, given: Responses) -> dict[str, StepRewards]:
    """Return each score's name in curves → its scores of steps, for the terms that score steps."""
    found: dict[str, StepRewards] = {}
    for term in stepped_terms(scorer):
        assert isinstance(term.scores, StepScores)
        found |= zip(term.score_names, step_rewards(term.scores, given, term.rules), strict=True)
    return found


def stepped_terms(scorer: Scorer) -> list[Term]:
    """Return the terms that score steps."""
    return [term for term in scorer.terms if isinstance(term.scores, StepScores)]


def weighted_sum(by_term: Mapping[str, Tensor], scorer: Scorer) -> Tensor:
    """Return the sum (B,) of the scorer's terms, each score clipped, moved and weighted by its rule; the models of an
    ensemble count as one."""
    return sum_of(list(summands_of(by_term, scorer)))


def sum_of(summands: Sequence[Summand]) -> Tensor:
    """Return the weighted sum (B,) of one part or more."""
    total = torch.zeros_like(summands[0].scores)
    for each in summands:
        total = total + each.weight * each.scores
    return total


def summands_of(by_term: Mapping[str, Tensor], scorer: Scorer) -> Iterator[Summand]:
    """Yield the parts of the weighted sum: those of the terms in their order, then that of the ensemble."""
    for term in scorer.terms:
        if term.name not in scorer.members and not isinstance(term.scores, StepScores):
            yield from term.summands(by_term)
    if scorer.ensemble is not None:
        yield Summand(scorer.ensemble.weight, of_members(by_term, scorer))


def of_members(by_term: Mapping[str, Tensor], scorer: Scorer) -> Tensor:
    """Return the combined score (B,) of the ensemble's models."""
    assert scorer.ensemble is not None
    scores = torch.stack([by_term[name] for name in scorer.members])
    return combined(scores, scorer.ensemble.combine, k=scorer.ensemble.k)


def apply_missing_eos(total: Tensor, ended: Tensor, rule: MissingEos | None) -> Tensor:
    """Apply the recipe's ``missing_eos`` rule to the scores (B,)."""
    if rule is None:
        return total
    if rule.subtract is not None:
        return subtract_missing_eos(total, ended, penalty=rule.subtract)
    assert rule.replace is not None
    return replace_missing_eos(total, ended, score=rule.replace)
