"""Load what the measurements of one seed read: artifacts of its run, and responses with their rewards."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vantage.algorithms.advantages import monte_carlo_returns
from vantage.algorithms.rewards import shape_rewards
from vantage.models.folders import load_policy
from vantage.models.heads import ScalarModel, load_scalar, values
from vantage.models.policy import PolicyModel
from vantage.models.sequences import Sequences
from vantage.schemas.kinds import resolve_work
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.resolved import ResolvedValuePretraining
from vantage.schemas.recipe.terms import VerifierTerm
from vantage.tasks.data.examples import Codec, Prompts, read_prompts
from vantage.tasks.rewards import model_scores, verifier_scores
from vantage.tasks.rewards.scoring import Scorer, Term, score
from vantage.tasks.rewards.verifiers import BUILTIN_FUNCTIONS
from vantage.tasks.rollout.engine import load_engine
from vantage.tasks.rollout.rollouts import Sampled, per_token, sample_responses

MICROBATCH = 64


@dataclass(frozen=True)
class Responses:
    """Responses with the reward's score at their last token: rewards and returns (B,T), γ = 1 and no KL."""

    sequences: Sequences
    rewards: Tensor

    @property
    def mask(self) -> Tensor:
        """(B,T)."""
        return self.sequences.response_mask

    @property
    def returns(self) -> Tensor:
        """Monte-Carlo returns (B,T)."""
        return monte_carlo_returns(self.rewards, self.mask, gamma=1.0)


@dataclass(frozen=True)
class Setting:
    """What one seed's measurements need, read from the artifacts of its run."""

    recipe: Recipe
    seed: int
    folders: dict[str, Path]
    codec: Codec

    def prompts(self, split: str) -> Prompts:
        """Return the recipe's prompts of one split."""
        return read_prompts(self.folders["data.prompts"], split, self.codec)

    def respond(self, prompts: Prompts, indices: Sequence[int], *, seed: int) -> Sampled:
        """Return responses of the SFT policy."""
        policy = PolicyModel(load_policy(self.folders["sft"]))
        engine = load_engine(policy, self.codec, limits=PassLimits())
        return sample_responses(engine, self.codec, prompts, indices, device=policy.device, seed=seed)

    def rewarded_by_rule(self, sampled: Sampled) -> Responses:
        """Return responses with the recipe's reward, a rule; the reward model is only a critic in it."""
        terms = self.recipe.rewards["main"].terms
        assert all(isinstance(term, VerifierTerm) for term in terms)
        return rewarded(
            sampled,
            [
                Term(
                    term.name,
                    term.weight,
                    verifier_scores.scored_by(BUILTIN_FUNCTIONS[term.verifier], wrong=term.wrong),
                )
                for term in terms
                if isinstance(term, VerifierTerm)
            ],
        )

    def rewarded_by_reward_model(self, sampled: Sampled) -> Responses:
        """Return the responses with the reward model's score as their reward: then the reward model is a critic of
        itself.
        """
        return rewarded(
            sampled,
            [
                Term(
                    "reward",
                    1.0,
                    model_scores.ModelScores(load_scalar(self.folders["reward"], role="reward")),
                )
            ],
        )


def rewarded(sampled: Sampled, terms: Sequence[Term]) -> Responses:
    """Return responses with the sum of the terms as the reward of their last token."""
    scores = score(
        Scorer(tuple(terms), missing_eos=None),
        sampled.sequences,
        prompts=sampled.prompts,
        responses=sampled.responses,
        answers=sampled.answers,
        ended=sampled.ended,
        limits=PassLimits(MICROBATCH),
    )
    mask = sampled.sequences.response_mask
    no_kl = torch.zeros(mask.shape)
    return Responses(sampled.sequences, shape_rewards(scores.total, no_kl, mask, kl_coef=0.0))


def value_stage(setting: Setting) -> ResolvedValuePretraining:
    """Return the recipe's value stage, for its optimiser's settings."""
    work = resolve_work(setting.recipe.stages["value"])
    assert isinstance(work, ResolvedValuePretraining)
    return work


def predict(critic: ScalarModel, sequences: Sequences) -> Tensor:
    """Return values (B,T), 0 outside the mask."""
    said = per_token(
        lambda part: {"values": values(critic, part)},
        sequences,
        limits=PassLimits(MICROBATCH),
        computes="values",
    )
    return said["values"]
