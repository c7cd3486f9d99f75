"""The kinds of stage as they run: what a recipe may leave open is written out, and has a type without None.

A kind that leaves nothing open has no class here. Fields and their order are those of the written class, so that both
make the same JSON and the same stage key.
"""

from schemas.recipe.algorithm import Returns
from schemas.recipe.fields import Count, Name, Positive
from schemas.recipe.stages import (
    BestOfN,
    DirectPreferenceOptimization,
    PolicyOptimization,
    PreferenceCollection,
    RewardModelling,
    Rollouts,
    SupervisedFineTuning,
    Training,
    ValuePretraining,
)


class ResolvedTraining(Training):
    """What every stage that trains a network runs with."""

    learning_rate: Positive
    """Of AdamW, after the warm-up."""


class ResolvedRollouts(Rollouts, ResolvedTraining):
    """What every stage runs with that samples from a policy and scores with a reward."""

    learning_rate: Positive


class ResolvedSupervisedFineTuning(SupervisedFineTuning, ResolvedTraining):
    """Next-token training on demonstrations."""

    learning_rate: Positive


class ResolvedRewardModelling(RewardModelling, ResolvedTraining):
    """Training of a scalar head on preference pairs or rankings."""

    learning_rate: Positive


class ResolvedDirectPreferenceOptimization(DirectPreferenceOptimization, ResolvedTraining):
    """DPO."""

    learning_rate: Positive
    reference: Name
    """What the policy is held to."""


class ResolvedValuePretraining(ValuePretraining, ResolvedRollouts):
    """Training of the critic alone."""

    learning_rate: Positive
    reference: Name
    """Where the KL part of the return is measured against."""
    returns: Returns
    """What is predicted."""


class ResolvedPolicyOptimization(PolicyOptimization, ResolvedRollouts):
    """PPO in the form that ``algorithm`` describes."""

    learning_rate: Positive
    reference: Name
    """Where KL is measured against."""

    @property
    def critics_rate(self) -> float:
        """``critic_learning_rate``, which is open where there is no critic.

        Raises:
            ValueError: there is none.
        """
        if self.critic_learning_rate is None:
            raise ValueError("critic_learning_rate was not written out, or the algorithm has no critic")
        return self.critic_learning_rate


class ResolvedBestOfN(BestOfN, ResolvedRollouts):
    """RAFT."""

    learning_rate: Positive


class ResolvedPreferenceCollection(PreferenceCollection):
    """Pairs sampled from a policy."""

    samples_per_prompt: Count
    """Responses to each prompt."""
