"""Provide the scored responses for value pretraining: sampled here, collected beforehand, or some of both."""

from dataclasses import dataclass, replace
from functools import cached_property, partial

from torch.optim import Optimizer

from vantage.models.folders import tokenizer_digest
from vantage.models.heads import ScalarModel, values
from vantage.schemas.recipe.resolved import ResolvedValuePretraining
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.examples import Prompts, read_prompts
from vantage.tasks.data.splits import TEST, TRAIN
from vantage.tasks.rollout.collected import Collected, read_collected
from vantage.tasks.rollout.group_sampling import join_scored
from vantage.tasks.rollout.rollout_models import RolloutModels
from vantage.tasks.rollout.rollouts import (
    Scored,
    begin_sampling,
    prompts_of_iteration,
    sample_and_score,
)
from vantage.tasks.training.data_order import DataOrder
from vantage.tasks.training.found_limits import Taken, longest_response
from vantage.tasks.training.seeds import derive_seed, stage_seed


@dataclass(frozen=True)
class ResponseSource:
    """Responses of the fixed policy. Each call is a pure function of the seed, so a resumed stage gets the same responses."""

    job: StageJob[ResolvedValuePretraining]
    models: RolloutModels
    prompts: Prompts
    """Prompts of the training split."""

    def ready(self, critic: ScalarModel, optimizer: Optimizer) -> "ResponseSource":
        """Return the source with the models of ``RolloutModels.ready``, for a critic that learns from its responses."""
        work = self.job.work
        taken = Taken(
            longest_response(self.prompts, self.job.generation, shares_prompt=work.pass_limits.share_prompts),
            [partial(values, critic)],
            work.arithmetic,
            [optimizer],
            self.models.sampler,
        )
        models, job = self.models.ready(self.job, taken)
        return replace(self, job=job, models=models)

    def for_iteration(self, iteration: int) -> Scored:
        """Return the responses of one training rollout: first collected ones, then sampled ones."""
        work = self.job.work
        parts = []
        if collected_count := work.batch_size - work.fresh_responses:
            collected = self._collected(TRAIN)
            order = DataOrder(
                num_examples=len(collected), batch_size=collected_count, seed=self._seed("collected")
            )
            parts.append(collected.select(order.batch(iteration), self.models.policy.device))
        if work.fresh_responses:
            indices, seed = self._fresh(iteration)
            parts.append(
                sample_and_score(self.models, self.prompts, indices, count=work.samples_per_prompt, seed=seed)
            )
        return join_scored(parts, pad_token_id=self.models.codec.pad_token_id)

    def begin_next(self, iteration: int) -> None:
        """Let the engine begin with the rollout of the next iteration, if it samples ahead and there is a next iteration."""
        if not self.models.ahead or iteration + 1 == self.job.work.iterations:
            return
        indices, seed = self._fresh(iteration + 1)
        begin_sampling(self.models, self.prompts, indices, count=self.job.work.samples_per_prompt, seed=seed)

    def for_moments(self) -> Scored:
        """Return one rollout of responses, whose scores define the unit of all scores."""
        work = self.job.work
        collected = None if work.rollouts is None else self._collected(TRAIN)
        order = DataOrder(
            num_examples=len(self.prompts if collected is None else collected),
            batch_size=work.batch_size,
            seed=self._seed("moments"),
        )
        if collected is not None:
            return collected.select(order.batch(0), self.models.policy.device)
        return sample_and_score(
            self.models, self.prompts, order.batch(0), seed=self._seed("moments sampling")
        )

    def held_out(self, split: str) -> Scored:
        """Return responses to the prompts of a held-out split; of collected ones, first one to each prompt, then the next
        one."""
        work = self.job.work
        num_samples = work.validation_samples
        if split == TEST and work.test_samples is not None:
            num_samples = work.test_samples
        if work.rollouts is not None:
            collected = self._collected(split)
            rows = [
                prompt * collected.samples_per_prompt + sample
                for sample in range(collected.samples_per_prompt)
                for prompt in range(collected.num_prompts)
            ]
            return collected.select(rows[:num_samples], self.models.policy.device)
        prompts = read_prompts(self.job.inputs["prompts"], split, self.models.codec)
        indices = [index % len(prompts) for index in range(num_samples)]
        return sample_and_score(self.models, prompts, indices, seed=self._seed(f"{split} sampling"))

    def _fresh(self, iteration: int) -> tuple[list[int], int]:
        """Return the prompts of a training rollout that are sampled here, by their indices, and the seed."""
        indices = prompts_of_iteration(
            iteration,
            num_responses=self.job.work.fresh_responses,
            samples_per_prompt=self.job.work.samples_per_prompt,
            num_prompts=len(self.prompts),
            seed=stage_seed(self.job),
        )
        return indices, self._seed("sampling", iteration)

    def _collected(self, split: str) -> Collected:
        return self._train if split == TRAIN else self._read(split)

    @cached_property
    def _train(self) -> Collected:
        return self._read(TRAIN)

    def _read(self, split: str) -> Collected:
        tokenizer = tokenizer_digest(self.job.inputs["policy"])
        return read_collected(self.job.inputs["rollouts"], split, self.models.codec, tokenizer=tokenizer)

    def _seed(self, stream: str, *indices: int) -> int:
        return derive_seed(stage_seed(self.job), stream, *indices)


def load_source(job: StageJob[ResolvedValuePretraining], models: RolloutModels) -> ResponseSource:
    """Return the stage's source of responses, from its recipe."""
    return ResponseSource(job, models, read_prompts(job.inputs["prompts"], TRAIN, models.codec))
