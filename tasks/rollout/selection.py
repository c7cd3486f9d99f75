"""Select the policy that a stage keeps: the one whose responses to the validation prompts score best."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vantage.algorithms.score_distribution import drift
from vantage.algorithms.uncertainty import Estimate, clustered_mean
from vantage.schemas.metric_names import INITIAL_PERCENTILES, VALIDATION_PERCENTILES
from vantage.schemas.recipe.algorithm import Returns
from vantage.schemas.records.metrics import SELECTION_PREFIX
from vantage.tasks.data.examples import Prompts
from vantage.tasks.rewards.scoring import score_metrics
from vantage.tasks.rollout.judge_agreement import disagreement_notice
from vantage.tasks.rollout.monitors import Monitors, percentiles
from vantage.tasks.rollout.rollout_models import RolloutModels
from vantage.tasks.rollout.rollouts import (
    Scored,
    sample_and_score,
    sequence_sums,
    shape,
)
from vantage.tasks.rollout.watching import WATCH_SCORE, Watching
from vantage.tasks.training import progress
from vantage.tasks.training.attempt import Attempt
from vantage.tasks.training.best_weights import Best, keep_if_best
from vantage.tasks.training.measured import clusters_of, defined
from vantage.tasks.training.networks import put_back
from vantage.tasks.training.seeds import derive_seed
from vantage.tasks.training.stage_state import BestSoFar

VALIDATION_SCORE = "validation_score"


@dataclass(frozen=True)
class Measured:
    """Measurements of the kept policy's responses to the test prompts."""

    estimates: dict[str, Estimate]
    reward_spread: float
    """Difference between the highest and the lowest score of the responses."""


@dataclass(frozen=True)
class Selection:
    """Measures a policy, always on the same prompts and with the same random numbers."""

    models: RolloutModels
    prompts: Prompts
    """Prompts of the validation split."""
    num_samples: int
    seed: int
    watching: Watching | None = None
    """Another judge of the same responses, or of responses to its own prompts."""
    keeps_by_watch: bool = False
    """Whether the policy that the watch's judge scores best is kept."""
    monitors: Monitors | None = None
    """Measurements beside the score."""

    def measure(self, test: Prompts, *, num_samples: int) -> Measured:
        """Return score, length (tokens), share of cut-off responses and, with a reference, KL (nats) of the present policy.

        All responses to one prompt are one cluster.

        Args:
            test: prompts that were not used for selection, since the best of several validation scores is optimistic.
            num_samples: number of responses; if there are more than prompts, the prompts repeat in order.
        """
        return self.describe(self.respond(test, num_samples=num_samples))

    def respond(self, test: Prompts, *, num_samples: int) -> Scored:
        """Return the present policy's responses to the test prompts, scored."""
        return self._respond(test, num_samples, stream="test sampling", phase="test")

    def describe(self, scored: Scored) -> Measured:
        """Return the result of ``measure``, for responses that ``respond`` has sampled."""
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

    def score(self, scored: Scored) -> float:
        """Return the mean score of responses to the validation prompts."""
        return scored.scores.total.mean().item()

    def keep_if_best(self, attempt: Attempt[Best], *, iteration: int) -> dict[str, float]:
        """Score the policy, and remember its weights if it scores best so far. Returns the metrics to log."""
        scored = self._respond(
            self.prompts, self.num_samples, stream="validation sampling", phase="validation"
        )
        metrics = {
            VALIDATION_SCORE: self.score(scored),
            **_distribution(attempt, scored.scores.total, is_first=iteration == 0),
            **score_metrics(scored.scores, scored.scores.graded, prefix=SELECTION_PREFIX),
            **self._watch(attempt, scored),
            **self._monitor(scored, iteration=iteration),
        }
        metric = WATCH_SCORE if self.keeps_by_watch else VALIDATION_SCORE
        policy = self.models.policy.causal_lm
        is_best = keep_if_best(attempt, policy, metrics[metric], metric=metric, iteration=iteration)
        if is_best and self.keeps_by_watch:
            attempt.state = replace(attempt.state, validation_score=defined(metrics[VALIDATION_SCORE]))
        return metrics

    def _watch(self, attempt: Attempt[Best], scored: Scored) -> dict[str, float]:
        """Ask the other judge, if there is one, and store its observations in the attempt's state."""
        if self.watching is None:
            return {}
        if self.watching.prompts is not None:
            scored = self._respond(
                self.watching.prompts,
                self.watching.num_samples,
                stream="watch sampling",
                phase="watched prompts",
            )
        is_first = not attempt.state.watched.judged
        with progress.within("watch"):
            seen, metrics = self.watching.look(scored, attempt.state.watched)
        preferred = {} if self.monitors is None else self.monitors.preference_accuracy
        if is_first and (notice := disagreement_notice(seen.agreement, preferred)) is not None:
            attempt.notice(notice)
        attempt.state = replace(attempt.state, watched=seen)
        return metrics

    def _monitor(self, scored: Scored, *, iteration: int) -> dict[str, float]:
        """Take the recipe's further measurements; none before the first iteration, which reports no curves."""
        if self.monitors is None or not iteration:
            return {}
        return self.monitors.measure(self.models.policy, scored.scores)

    def put_back_best(self, attempt: Attempt[Best]) -> None:
        """Restore the weights that scored best, in the policy and the engine."""
        put_back(self.models.policy.causal_lm, attempt.best)
        self.models.sync_engine()

    def _respond(self, prompts: Prompts, num_samples: int, *, stream: str, phase: str) -> Scored:
        indices = [index % len(prompts) for index in range(num_samples)]
        with progress.within(phase):
            return sample_and_score(self.models, prompts, indices, seed=derive_seed(self.seed, stream))


def kept_by(state: BestSoFar, *, keeps_by_watch: bool) -> dict[str, float | None]:
    """Return the score that chose the kept policy; if it is from the watch's judge, also the reward's score."""
    if keeps_by_watch:
        return {VALIDATION_SCORE: state.validation_score, WATCH_SCORE: state.best}
    return {VALIDATION_SCORE: state.best}


def _distribution(attempt: Attempt[Best], scores: Tensor, *, is_first: bool) -> dict[str, float]:
    """Return the spread of the scores (B,), and their distance from those of the first measurement."""
    if is_first:
        attempt.state = replace(attempt.state, first_scores=tuple(scores.double().tolist()))
    spread = dict(zip(VALIDATION_PERCENTILES, percentiles(scores), strict=True))
    first = torch.tensor(attempt.state.first_scores, dtype=torch.float64)
    if not len(first):
        return spread
    moved = {
        **dict(zip(INITIAL_PERCENTILES, percentiles(first), strict=True)),
        "validation_score_drift": drift(scores, first),
    }
    return {name: value for name, value in {**spread, **moved}.items() if value == value}
