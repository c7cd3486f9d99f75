"""What a response is worth under a recipe's reward: a weighted sum of reward models and verifiers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.rewards import replace_missing_eos, subtract_missing_eos
from models.chunks import chunks
from models.folders import tokenizer_digest
from models.heads import ScalarModel, load_scalar, scores
from models.sequences import Sequences
from schemas.recipe.rewards import MissingEos
from schemas.records.job import StageJob
from tasks.rewards.verifier_file import Verifier
from tasks.rewards.verifiers import load_verifier, verdicts
from tasks.training import progress


class TokenizersDiffer(ValueError):
    """Two models that must read the same ids do not."""


@dataclass(frozen=True)
class Term:
    """One summand of a reward, loaded."""

    name: str
    weight: float
    scorer: ScalarModel | Verifier
    wrong: float = 0.0
    """A verifier's score of a wrong response; a right one has 1."""


@dataclass(frozen=True)
class Scorer:
    """A reward, loaded."""

    terms: tuple[Term, ...]
    missing_eos: MissingEos | None


@dataclass(frozen=True)
class Scores:
    """Scores (B,) of whole responses, before any scaling and KL."""

    total: Tensor
    """The weighted sum of the terms, with the missing-EOS rule applied."""
    weighted_sum: Tensor
    """The same without that rule: what tells whether all responses of a group are equally right."""
    by_term: dict[str, Tensor]


def load_scorer(
    job: StageJob, reward: str, *, tokenizer_of: str, device: torch.device, dtype: torch.dtype = torch.float32
) -> Scorer:
    """Load the reward's models and verifiers.

    Args:
        tokenizer_of: the role of the policy whose ids the reward models will be given.
        dtype: of the models' trunks.

    Raises:
        TokenizersDiffer: a reward model was trained with another tokenizer than the policy's.
        BrokenVerifier, MissingAnswers: see ``load_verifier``.
    """
    policy_tokenizer = tokenizer_digest(job.inputs[tokenizer_of])
    terms = []
    for index, term in enumerate(job.rewards[reward].terms):
        role = f"reward.{reward}.{index}"
        if term.verifier is not None:
            verifier = load_verifier(job, term.verifier, role=role)
            terms.append(Term(name=term.name, weight=term.weight, scorer=verifier, wrong=term.wrong))
            continue
        assert term.model is not None
        folder = job.inputs[role]
        if tokenizer_digest(folder) != policy_tokenizer:
            raise TokenizersDiffer(
                f"rewards.{reward}.terms.{index}.model={term.model!r} has another tokenizer than {tokenizer_of}; "
                "train the reward model from the same model as the policy"
            )
        terms.append(
            Term(
                name=term.name,
                weight=term.weight,
                scorer=load_scalar(folder, role="reward", dtype=dtype).to(device),
            )
        )
    return Scorer(terms=tuple(terms), missing_eos=job.rewards[reward].missing_eos)


@torch.no_grad()
def score(
    scorer: Scorer,
    sequences: Sequences,
    *,
    prompts: Sequence[str],
    responses: Sequence[str],
    answers: Sequence[str | None],
    ended: Tensor,
    microbatch_size: int | None,
) -> Scores:
    """Score a batch; a verifier gives 1 for right, and for wrong what its term says.

    Args:
        ended: (B,) True where the response reached its end-of-sequence token.
    """
    by_term = {}
    total = torch.zeros(len(prompts), device=ended.device)
    for term in scorer.terms:
        if isinstance(term.scorer, ScalarModel):
            term_scores = _model_scores(term.scorer, sequences, microbatch_size)
        else:
            right = torch.tensor(
                verdicts(term.scorer, prompts, responses, answers), dtype=torch.bool, device=ended.device
            )
            term_scores = torch.where(right, 1.0, term.wrong)
        by_term[term.name] = term_scores
        total = total + term.weight * term_scores
    return Scores(
        total=apply_missing_eos(total, ended, scorer.missing_eos), weighted_sum=total, by_term=by_term
    )


def apply_missing_eos(total: Tensor, ended: Tensor, rule: MissingEos | None) -> Tensor:
    """The recipe's ``missing_eos`` rule."""
    if rule is None:
        return total
    if rule.subtract is not None:
        return subtract_missing_eos(total, ended, penalty=rule.subtract)
    assert rule.replace is not None
    return replace_missing_eos(total, ended, score=rule.replace)


def _model_scores(model: ScalarModel, sequences: Sequences, microbatch_size: int | None) -> Tensor:
    parts = []
    for rows in chunks(len(sequences), microbatch_size):
        progress.phase("scoring", rows.start, len(sequences))
        parts.append(scores(model, sequences.select(rows)).float())
    return torch.cat(parts)
