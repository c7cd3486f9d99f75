"""Baselines of responses that depend only on the prompt, from responses that were collected beforehand."""

import torch
from torch import Tensor, nn

from vantage.algorithms.baselines import TrackedMeans, optimal_values, sample_means, tracked
from vantage.algorithms.rewards import RunningMoments
from vantage.models.folders import tokenizer_digest
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.resolved import ResolvedPolicyOptimization
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.splits import TRAIN
from vantage.tasks.rollout.collected import Collected, prompt_numbers, read_collected
from vantage.tasks.rollout.rollout_models import RolloutModels
from vantage.tasks.rollout.rollouts import Sampled, shape_scores


class PromptBaselines(nn.Module):
    """Baselines of ``reference_mean``, ``optimal_value`` and ``tracked_mean``; those of ``tracked_mean`` are in
    checkpoints."""

    means: Tensor
    """(P,): running mean of each prompt. This tensor and the next ones are only for ``tracked_mean``."""
    weights: Tensor
    kl_at_last: Tensor
    """(P,): ``kl`` when a prompt was last sampled."""
    kl: Tensor
    """KL(old‖new) of all updates so far, in nats per token."""

    def __init__(self, collected: Collected, algorithm: Algorithm, *, max_length: int) -> None:
        """Prepare baselines of prompts; ``max_length``: most tokens of a response."""
        super().__init__()
        self._collected, self._algorithm, self._max_length = collected, algorithm, max_length
        if algorithm.advantage == "tracked_mean":
            means = sample_means(self._scaled(RunningMoments()))
            # A prompt's collected scores get at most the weight that tracked scores can reach
            weight = min(float(collected.samples_per_prompt), 1 / (1 - algorithm.tracker_memory_low))
            self.register_buffer("means", means)
            self.register_buffer("weights", torch.full_like(means, weight))
            self.register_buffer("kl_at_last", torch.zeros_like(means))
            self.register_buffer("kl", torch.zeros((), dtype=torch.float64))

    @property
    def moves(self) -> bool:
        """Return whether the baselines change during the stage."""
        return self._algorithm.advantage == "tracked_mean"

    def of(self, sampled: Sampled, moments: RunningMoments) -> Tensor:
        """Return the baseline (B,) of each response, in units of the scaled scores of this rollout.

        Raises:
            PromptNotCollected: a prompt has no collected response.
        """
        numbers = prompt_numbers(self._collected, sampled.prompts, sampled.answers)
        if self.moves:
            by_prompt = self.means
        elif self._algorithm.advantage == "optimal_value":
            by_prompt = optimal_values(self._scaled(moments), beta=self._algorithm.optimal_value_beta)
        else:
            by_prompt = sample_means(self._scaled(moments))
        return by_prompt[numbers].to(sampled.ended.device)

    def learn(self, sampled: Sampled, scaled_scores: Tensor, *, kl: float) -> None:
        """Add a rollout's scores (B,) to the running means, after the update on it moved the policy by ``kl``, nats per
        token."""
        numbers = prompt_numbers(self._collected, sampled.prompts, sampled.answers)
        after = tracked(
            TrackedMeans(self.means, self.weights),
            numbers,
            scaled_scores.cpu(),
            self.kl - self.kl_at_last,
            half_life=self._algorithm.tracker_kl_half_life,
            low=self._algorithm.tracker_memory_low,
            high=self._algorithm.tracker_memory_high,
        )
        self.means, self.weights = after.means, after.weights
        self.kl_at_last = self.kl_at_last.index_fill(0, numbers, self.kl.item())
        self.kl = self.kl + kl

    def _scaled(self, moments: RunningMoments) -> Tensor:
        """Return the collected scores (P,K), scaled like those of a rollout."""
        scaled = shape_scores(
            self._collected.scores,
            self._collected.lengths,
            self._algorithm,
            moments,
            max_length=self._max_length,
        )
        return scaled.view(-1, self._collected.samples_per_prompt)


def load_baselines(
    job: StageJob[ResolvedPolicyOptimization], models: RolloutModels
) -> PromptBaselines | None:
    """Return the baselines that the switches ask for; None if they ask for none."""
    algorithm = job.work.algorithm
    if not algorithm.reads_rollouts:
        return None
    digest = tokenizer_digest(job.inputs["init"])
    collected = read_collected(job.inputs["rollouts"], TRAIN, models.codec, tokenizer=digest)
    return PromptBaselines(collected, algorithm, max_length=job.generation.max_response_tokens)
