"""Responses sampled from a policy, and the rewards that its critic and its update learn from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from algorithms.kl import kl_estimate
from algorithms.rewards import shape_rewards
from models.heads import ScalarModel, values
from models.logprobs import response_logprobs
from models.prompts import decode_all
from models.sampling import sample
from models.sequences import Sequences, collate
from tasks.data_order import DataOrder
from tasks.examples import Codec, Prompts
from tasks.optimization import autocast, chunks
from tasks.scoring import Scorer, score


@dataclass(frozen=True)
class Sampled:
    """Responses to prompts: as text, as ids, and whether each ended by itself (B,)."""

    prompts: list[str]
    responses: list[str]
    sequences: Sequences
    ended: Tensor


@dataclass(frozen=True)
class Rollout:
    """Sampled responses with everything that was fixed when they were sampled.

    ``scores`` (B,) are before KL, ``term_scores`` the same by term; ``logprobs`` (B,T) are the sampling policy's,
    ``kl`` (B,T) the k1 estimate against the reference (0 without one), ``rewards`` (B,T) the shaped reward.
    """

    sampled: Sampled
    scores: Tensor
    term_scores: dict[str, Tensor]
    logprobs: Tensor
    kl: Tensor
    rewards: Tensor

    @property
    def sequences(self) -> Sequences:
        """The ids that were sampled."""
        return self.sampled.sequences


@dataclass(frozen=True)
class Actors:
    """The models that a rollout needs, and how they compute."""

    policy: PreTrainedModel
    reference: PreTrainedModel | None
    """None: KL is not measured and counts as 0."""
    scorer: Scorer
    codec: Codec
    microbatch_size: int | None
    precision: str


def prompts_of_iteration(
    iteration: int, *, num_responses: int, samples_per_prompt: int, num_prompts: int, seed: int
) -> list[int]:
    """Indices of the prompts of one rollout, each as often in a row as it is sampled."""
    order = DataOrder(num_examples=num_prompts, batch_size=num_responses // samples_per_prompt, seed=seed)
    return [index for index in order.batch(iteration) for _ in range(samples_per_prompt)]


def sample_responses(
    policy: PreTrainedModel,
    codec: Codec,
    prompts: Prompts,
    indices: Sequence[int],
    *,
    seed: int,
    microbatch_size: int | None,
    greedy: bool = False,
) -> Sampled:
    """One response to each of the prompts at ``indices``."""
    prompt_ids = [prompts.ids[index] for index in indices]
    samples = sample(
        policy,
        prompt_ids,
        max_new_tokens=codec.generation.max_response_tokens,
        temperature=codec.generation.temperature,
        eos_token_ids=codec.stop_token_ids,
        pad_token_id=codec.pad_token_id,
        seed=seed,
        greedy=greedy,
        microbatch_size=microbatch_size,
    )
    sequences = collate(prompt_ids, samples.responses, pad_token_id=codec.pad_token_id)
    return Sampled(
        prompts=[prompts.texts[index] for index in indices],
        responses=decode_all(codec.tokenizer, samples.responses),
        sequences=sequences.to(policy.device),
        ended=torch.tensor(samples.ended, device=policy.device),
    )


def collect(
    actors: Actors, prompts: Prompts, indices: Sequence[int], *, kl_coef: float, seed: int
) -> Rollout:
    """Sample, score, and shape the rewards: −β·k1 on every token, the score on the last one."""
    # 1. Sample
    sampled = sample_responses(
        actors.policy,
        actors.codec,
        prompts,
        indices,
        seed=seed,
        microbatch_size=actors.microbatch_size,
    )

    # 2. Score whole responses
    scored = score(
        actors.scorer,
        sampled.sequences,
        prompts=sampled.prompts,
        responses=sampled.responses,
        ended=sampled.ended,
        microbatch_size=actors.microbatch_size,
    )

    # 3. Log-probabilities of the policy that sampled, and of the reference
    logprobs = rollout_logprobs(actors.policy, sampled.sequences, actors)
    if actors.reference is None:
        kl = torch.zeros_like(logprobs)
    else:
        kl = kl_estimate(logprobs, rollout_logprobs(actors.reference, sampled.sequences, actors), kind="k1")

    # 4. One reward per token
    rewards = shape_rewards(scored.total, kl, sampled.sequences.response_mask, kl_coef=kl_coef)
    return Rollout(
        sampled=sampled,
        scores=scored.total,
        term_scores=scored.by_term,
        logprobs=logprobs,
        kl=kl,
        rewards=rewards,
    )


def rollout_logprobs(model: PreTrainedModel, sequences: Sequences, actors: Actors) -> Tensor:
    """Log-probabilities (B,T) under the sampling distribution, in the numerics that training uses."""

    def logprobs(micro: Sequences) -> Tensor:
        with autocast(actors.precision, micro.input_ids.device):
            return response_logprobs(model, micro, temperature=actors.codec.generation.temperature).logprobs

    return per_token(logprobs, sequences, microbatch_size=actors.microbatch_size)


def rollout_values(critic: ScalarModel, sequences: Sequences, actors: Actors) -> Tensor:
    """Values (B,T) of the prefixes that chose each token, in the numerics that training uses."""

    def predicted(micro: Sequences) -> Tensor:
        with autocast(actors.precision, micro.input_ids.device):
            return values(critic, micro)

    return per_token(predicted, sequences, microbatch_size=actors.microbatch_size)


@torch.no_grad()
def per_token(
    compute: Callable[[Sequences], Tensor], sequences: Sequences, *, microbatch_size: int | None
) -> Tensor:
    """``compute`` over micro-batches, gathered into float32 (B,T) with 0 outside the mask."""
    gathered = torch.zeros(sequences.response_ids.shape, device=sequences.response_ids.device)
    for rows in chunks(len(sequences), microbatch_size):
        micro = sequences.select(rows)
        width = micro.response_ids.shape[1]
        gathered[rows, :width] = compute(micro).float().masked_fill(~micro.response_mask, 0.0)
    return gathered


def sequence_sums(per_token_values: Tensor, response_mask: Tensor) -> Tensor:
    """Sums over each response's tokens, (B,T) → (B,)."""
    return per_token_values.masked_fill(~response_mask, 0.0).sum(dim=1)
