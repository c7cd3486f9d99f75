"""The resolved kinds of stage: fields that a recipe may leave out have a type without None here.

A kind without such fields has no class here. Fields and their order are those of the recipe's class, so that both give
the same JSON and the same stage key.
"""

from vantage.schemas.recipe.algorithm import Returns
from vantage.schemas.recipe.critic_head import ONE_VALUE, CriticHead
from vantage.schemas.recipe.distillation import Distillation
from vantage.schemas.recipe.fields import Count, Name, Positive
from vantage.schemas.recipe.stage import Training
from vantage.schemas.recipe.stages import BestOfN, PolicyOptimization, Rollouts, ValuePretraining
from vantage.schemas.recipe.stages_on_data import (
    DirectPreferenceOptimization,
    RewardModelling,
    SupervisedFineTuning,
)
from vantage.schemas.recipe.stages_that_collect import PreferenceCollection, RolloutCollection
from vantage.schemas.recipe.unpaired import KahnemanTverskyOptimization


class ResolvedTraining(Training):
    """Fields of every stage that trains a network."""

    learning_rate: Positive
    """Learning rate of AdamW after the warm-up."""


class ResolvedRollouts(Rollouts, ResolvedTraining):
    """Fields of every stage that samples from a policy and scores with a reward."""

    learning_rate: Positive


class ResolvedSupervisedFineTuning(SupervisedFineTuning, ResolvedTraining):
    """Next-token training on demonstrations."""

    learning_rate: Positive


class ResolvedRewardModelling(RewardModelling, ResolvedTraining):
    """Training of a scalar head on preference pairs or rankings."""

    learning_rate: Positive


class ResolvedDirectPreferenceOptimization(DirectPreferenceOptimization, ResolvedTraining):
    """DPO and its relatives. ``reference`` is None where the loss reads none."""

    learning_rate: Positive


class ResolvedKahnemanTverskyOptimization(KahnemanTverskyOptimization, ResolvedTraining):
    """KTO."""

    learning_rate: Positive
    reference: Name
    """The policy that KL is measured against."""


class ResolvedValuePretraining(ValuePretraining, ResolvedRollouts):
    """Training of the critic alone."""

    learning_rate: Positive
    reference: Name
    """The policy that the KL part of the return is measured against."""
    returns: Returns
    """The returns that the critic predicts."""

    @property
    def critic_head(self) -> CriticHead:
        """Return the form of the critic's prediction at each position."""
        return ONE_VALUE if self.head is None else self.head

    @property
    def fresh_responses(self) -> int:
        """Responses of each training rollout that are sampled here."""
        return self.batch_size if self.rollouts is None else round(self.fresh_share * self.batch_size)


class ResolvedPolicyOptimization(PolicyOptimization, ResolvedRollouts):
    """Policy optimisation."""

    learning_rate: Positive
    reference: Name
    """The policy that KL is measured against."""

    @property
    def required_critic_learning_rate(self) -> float:
        """``critic_learning_rate``, which is None if the algorithm has no critic.

        Raises:
            ValueError: it is None.
        """
        if self.critic_learning_rate is None:
            raise ValueError("critic_learning_rate was not resolved, or the algorithm has no critic")
        return self.critic_learning_rate


class ResolvedBestOfN(BestOfN, ResolvedRollouts):
    """RAFT."""

    learning_rate: Positive


class ResolvedDistillation(Distillation, ResolvedRollouts):
    """On-policy distillation."""

    learning_rate: Positive


class ResolvedPreferenceCollection(PreferenceCollection):
    """Pairs sampled from a policy."""

    samples_per_prompt: Count
    """Responses to each prompt."""


class ResolvedRolloutCollection(RolloutCollection):
    """Scored responses of a policy."""

    held_out_samples_per_prompt: Count
    """Responses to each validation or test prompt."""
