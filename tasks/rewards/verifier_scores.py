"""A term that asks a verifier: 1 for a right response, and for a wrong one what the term says."""

import torch
from torch import Tensor

from schemas.recipe.terms import VerifierTerm
from tasks.rewards.term_scores import Responses, Source, TermScores
from tasks.rewards.verifier_file import VerifierFunction
from tasks.rewards.verifiers import load_verifier, verdicts


def load(term: VerifierTerm, source: Source) -> TermScores:
    """The verifier's word.

    Raises:
        BrokenVerifier, MissingAnswers: see ``load_verifier``.
    """
    return scored_by(load_verifier(source.job, term.verifier, role=source.role), wrong=term.wrong)


def scored_by(verifier: VerifierFunction, *, wrong: float = 0.0) -> TermScores:
    """Scores by a loaded verifier."""

    def scores(given: Responses) -> Tensor:
        right = verdicts(verifier, given.prompts, given.responses, given.answers)
        return torch.where(torch.tensor(right, dtype=torch.bool, device=given.device), 1.0, wrong)

    return scores
