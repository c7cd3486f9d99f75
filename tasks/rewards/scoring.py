"""Score responses by a recipe's reward: the weighted sum of its terms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from vantage.algorithms.ensembles import combined
from vantage.algorithms.rewards import replace_missing_eos, subtract_missing_eos
from vantage.models.sequences import Sequences
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rewards import Ensemble, MissingEos
from vantage.schemas.recipe.terms import RewardTerm, row_of
from vantage.schemas.records.job import StageJob
from vantage.tasks.rewards.term_scores import Responses, Source, TermScores


@dataclass(frozen=True)
class Term:
    """One loaded summand of a reward."""

    name: str
    weight: float
    scores: TermScores
    is_model: bool = False
    """Whether a reward model scores it."""


@dataclass(frozen=True)
class Scorer:
    """A loaded reward."""

    terms: tuple[Term, ...]
    missing_eos: MissingEos | None
    ensemble: Ensemble | None = None
    members: tuple[str, ...] = ()
    """Names of the terms that the ensemble combines."""


@dataclass(frozen=True)
class Scores:
    """Scores (B,) of whole responses, before any scaling and KL."""

    total: Tensor
    """The weighted sum of the terms, with the missing-EOS rule applied."""
    weighted_sum: Tensor
    """The weighted sum without that rule; it shows whether all responses of a group are equally right."""
    by_term: dict[str, Tensor]


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
        TokenizersDiffer, BrokenVerifier, MissingAnswers: see the terms' modules.
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
        terms.append(Term(term.name, term.weight, _load(term, source), is_model=term.stage is not None))
    whole = job.rewards[reward]
    return Scorer(tuple(terms), whole.missing_eos, ensemble=whole.ensemble, members=whole.members)


def _load(term: RewardTerm, source: Source) -> TermScores:
    loaded: TermScores = import_module(row_of(term).module).load(term, source)
    return loaded


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
) -> Scores:
    """Score a batch.

    Args:
        ended: (B,) True where the response ended with its end-of-sequence token.
    """
    given = Responses(sequences, prompts, responses, answers, ended.device, limits)
    by_term = {term.name: term.scores(given) for term in scorer.terms}
    total = weighted_sum(by_term, scorer)
    return Scores(
        total=apply_missing_eos(total, ended, scorer.missing_eos), weighted_sum=total, by_term=by_term
    )


def weighted_sum(by_term: Mapping[str, Tensor], scorer: Scorer) -> Tensor:
    """Return the sum (B,) of the scorer's terms, each by its weight; those of an ensemble count as one."""
    total = torch.zeros_like(by_term[scorer.terms[0].name])
    for term in scorer.terms:
        if term.name not in scorer.members:
            total = total + term.weight * by_term[term.name]
    if scorer.ensemble is not None:
        total = total + scorer.ensemble.weight * of_members(by_term, scorer)
    return total


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
