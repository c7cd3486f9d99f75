"""The judge of evaluation and of preference collection: a verifier or a reward, as one function of responses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rewards import Judge
from vantage.schemas.records.job import StageJob
from vantage.tasks.rewards.scoring import Scorer, load_scorer, score
from vantage.tasks.rewards.verifier_scores import judged
from vantage.tasks.rewards.verifiers import load_deciding_verifier
from vantage.tasks.rollout.prompted_judge import PromptedJudge
from vantage.tasks.rollout.rollouts import Sampled

Judgement = Callable[[Sampled], Tensor]
"""Responses → (B,), on the CPU: right (1) or wrong (0) from a verifier, or scores from a reward."""

AnyJudge = TypeVar("AnyJudge", bound=Judgement | PromptedJudge)


@dataclass(frozen=True)
class RewardJudge:
    """A reward that judges."""

    scorer: Scorer
    limits: PassLimits

    def __call__(self, sampled: Sampled) -> Tensor:
        """Return the scores (B,) of responses."""
        scored = score(
            self.scorer,
            sampled.sequences,
            prompts=sampled.prompts,
            responses=sampled.responses,
            answers=sampled.answers,
            ended=sampled.ended,
            limits=self.limits,
            conversations=sampled.conversations,
        )
        return scored.total.cpu()


def judge_within(judge: AnyJudge, limits: PassLimits) -> AnyJudge:
    """Return the judge with passes of its models within ``limits``; a verifier makes no passes."""
    if isinstance(judge, RewardJudge | PromptedJudge):
        return replace(judge, limits=limits)
    return judge


def load_judge(
    job: StageJob,
    judge: Judge,
    *,
    role: str = "judge",
    policies: Sequence[str],
    device: torch.device,
    limits: PassLimits,
) -> Judgement:
    """Return the recipe's judge, loaded.

    Args:
        role: the field that names the judge.
        policies: roles of the policies whose responses are judged; a reward's models read their ids.

    Raises:
        TokenizersDiffer, BrokenVerifier, MissingAnswers: see ``load_scorer`` and ``load_verifier``.
    """
    if judge.verifier is not None:
        verifier = load_deciding_verifier(job, judge.verifier, role=role)
        return lambda sampled: judged(verifier, sampled.prompts, sampled.responses, sampled.answers).float()
    assert judge.reward is not None
    return RewardJudge(load_scorer(job, judge.reward, tokenizers_of=policies, device=device), limits)
