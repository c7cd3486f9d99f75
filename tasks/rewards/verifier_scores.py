"""Score responses by a verifier: 1 for a right response, and the term's value for a wrong one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vantage.schemas.recipe.terms import VerifierTerm
from vantage.tasks.rewards.term_scores import Responses, Source, TermScores
from vantage.tasks.rewards.verifier_file import VerifierFunction
from vantage.tasks.rewards.verifiers import load_verifier, verdicts
from vantage.tasks.training import ranks


def load(term: VerifierTerm, source: Source) -> TermScores:
    """Return the term's verifier, loaded.

    Raises:
        BrokenVerifier, MissingAnswers: see ``load_verifier``.
    """
    return scored_by(load_verifier(source.job, term.verifier, role=source.role), wrong=term.wrong)


def scored_by(verifier: VerifierFunction, *, wrong: float = 0.0) -> TermScores:
    """Return scores by a loaded verifier."""

    return VerifierScores(verifier, wrong)


@dataclass(frozen=True)
class VerifierScores:
    """Scores 1 for a right response, ``wrong`` for a wrong one."""

    verifier: VerifierFunction
    wrong: float

    def __call__(self, given: Responses) -> Tensor:
        """Return scores (B,)."""
        right = judged(self.verifier, given.prompts, given.responses, given.answers)
        return torch.where(right.to(given.device), 1.0, self.wrong)


def judged(
    verifier: VerifierFunction,
    prompts: Sequence[str],
    responses: Sequence[str],
    answers: Sequence[str | None],
) -> Tensor:
    """Return which responses are right, (B,), on the CPU; one rank asks about each."""
    mine = ranks.own(len(prompts))
    right = torch.zeros(len(prompts), dtype=torch.int64)
    right[mine] = torch.tensor(
        verdicts(verifier, prompts[mine], responses[mine], answers[mine]), dtype=torch.int64
    )
    return ranks.total(right).bool()
