"""Which policy a stage keeps: the one whose responses to the validation prompts score best."""

from dataclasses import dataclass

from vantage.algorithms.uncertainty import Estimate, clustered_mean
from vantage.schemas.recipe.algorithm import Returns
from vantage.tasks.data.examples import Prompts
from vantage.tasks.rollout.rollout_models import RolloutModels
from vantage.tasks.rollout.rollouts import (
    Scored,
    sample_and_score,
    sequence_sums,
    shape,
)
from vantage.tasks.training import progress
from vantage.tasks.training.attempt import Attempt
from vantage.tasks.training.best_weights import Best, keep_if_best
from vantage.tasks.training.measured import clusters_of
from vantage.tasks.training.networks import put_back
from vantage.tasks.training.seeds import derive_seed


@dataclass(frozen=True)
class Measured:
    """What the kept policy's responses to the test prompts were like."""

    estimates: dict[str, Estimate]
    reward_spread: float
    """The highest of their scores less the lowest."""


@dataclass(frozen=True)
class Selection:
    """How a policy is measured: always on the same prompts, with the same random numbers."""

    models: RolloutModels
    prompts: Prompts
    """Of the validation split."""
    num_samples: int
    seed: int

    def measure(self, test: Prompts, *, num_samples: int) -> Measured:
        """Return score, length (tokens), cut-off share and, against a reference, KL (nats) of the policy as it is now.

        All responses to one prompt are one cluster.

        Args:
            test: prompts that chose nothing: the best of several validation scores is optimistic.
            num_samples: responses to them.
        """
        scored = self._respond(test, num_samples, stream="test sampling", phase="test")
        measured = {"test_score": scored.scores.total}
        if self.models.reference is not None:
            rollout = shape(self.models, scored, returns=Returns())
            measured["kl_to_reference"] = sequence_sums(rollout.log_ratios, rollout.sequences.response_mask)
        measured["mean_response_length"] = scored.sampled.sequences.lengths
        measured["truncated_share"] = ~scored.sampled.ended
        prompts = clusters_of(scored.sampled.prompts)
        return Measured(
            estimates={name: clustered_mean(values, prompts) for name, values in measured.items()},
            reward_spread=(scored.scores.total.max() - scored.scores.total.min()).item(),
        )

    def score(self) -> float:
        """Return the mean score of responses to the validation prompts."""
        scored = self._respond(
            self.prompts, self.num_samples, stream="validation sampling", phase="validation"
        )
        return scored.scores.total.mean().item()

    def keep_if_best(self, attempt: Attempt[Best], *, iteration: int) -> dict[str, float]:
        """Score the policy; remember its weights when it scores best so far. Returns what to log."""
        metric, measured = "validation_score", self.score()
        keep_if_best(attempt, self.models.policy.causal_lm, measured, metric=metric, iteration=iteration)
        return {metric: measured}

    def put_back_best(self, attempt: Attempt[Best]) -> None:
        """Give the policy and the engine the weights that scored best."""
        put_back(self.models.policy.causal_lm, attempt.best)
        self.models.sync_engine()

    def _respond(self, prompts: Prompts, num_samples: int, *, stream: str, phase: str) -> Scored:
        indices = [index % len(prompts) for index in range(num_samples)]
        with progress.within(phase):
            return sample_and_score(self.models, prompts, indices, seed=derive_seed(self.seed, stream))
