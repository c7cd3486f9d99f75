"""Responses sampled from a policy, and the rewards that its critic and its update learn from."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from algorithms.kl import kl_estimate
from algorithms.rewards import (
    RunningMoments,
    overlong_penalty,
    scale_scores,
    shape_rewards,
)
from models.chunks import chunks
from models.heads import ScalarModel, values, values_and_final
from models.logprobs import LogProbs, response_logprobs
from models.prompts import decode_all
from models.sampling import sample
from models.sequences import Sequences, collate
from schemas.recipe.algorithm import Returns
from tasks.data.examples import Codec, Prompts
from tasks.rewards.scoring import Scorer, Scores, score
from tasks.training import progress
from tasks.training.data_order import DataOrder
from tasks.training.optimization import Precision, autocast


@dataclass(frozen=True)
class Sampled:
    """Responses to prompts: as text, as ids, and whether each ended by itself (B,)."""

    prompts: list[str]
    answers: list[str | None]
    """The rows' own, for verifiers."""
    responses: list[str]
    sequences: Sequences
    ended: Tensor
    sampler_logprobs: Tensor
    """(B,T): what the sampler itself said of each token when it drew it, in nats; 0 outside the mask."""

    def select(self, rows: Sequence[int]) -> "Sampled":
        """The responses at ``rows``, in that order."""
        places = torch.tensor(rows, device=self.ended.device)
        sequences = self.sequences.select(places)
        return Sampled(
            prompts=[self.prompts[row] for row in rows],
            answers=[self.answers[row] for row in rows],
            responses=[self.responses[row] for row in rows],
            sequences=sequences,
            ended=self.ended[places],
            sampler_logprobs=self.sampler_logprobs[places, : sequences.response_ids.shape[1]],
        )


@dataclass(frozen=True)
class Scored:
    """Sampled responses with their scores, before any scaling and KL."""

    sampled: Sampled
    scores: Scores

    def select(self, rows: Sequence[int]) -> "Scored":
        """The responses at ``rows``, in that order."""
        places = torch.tensor(rows, device=self.sampled.ended.device)
        return Scored(
            sampled=self.sampled.select(rows),
            scores=Scores(
                total=self.scores.total[places],
                weighted_sum=self.scores.weighted_sum[places],
                by_term={name: term[places] for name, term in self.scores.by_term.items()},
            ),
        )


@dataclass(frozen=True)
class Rollout:
    """Sampled responses with everything that was fixed when they were sampled."""

    sampled: Sampled
    scores: Scores
    scaled_scores: Tensor
    """(B,): scaled, clipped and shaped by length, as ``Returns`` says; what the last token is paid."""
    logprobs: Tensor
    """(B,T): the sampling policy's."""
    ref_logprobs: Tensor | None
    """(B,T): the reference's, where there is one."""
    kl: Tensor
    """(B,T): KL to the reference of the kind that the reward counts; 0 without a reference."""
    kl_coef: float
    rewards: Tensor
    """(B,T): −kl_coef · kl on every token, and the scaled score on the last."""
    values: Tensor | None = None
    """(B,T): what a value head on the sampling policy's trunk read, where there is one."""
    final_values: Tensor | None = None
    """(B,): what it read at the last token of each response, where that is asked for."""

    @property
    def sequences(self) -> Sequences:
        """The ids that were sampled."""
        return self.sampled.sequences

    @property
    def log_ratios(self) -> Tensor:
        """(B,T): log π − log π_ref of each sampled token (k1), in nats; 0 without a reference."""
        return (
            torch.zeros_like(self.logprobs)
            if self.ref_logprobs is None
            else self.logprobs - self.ref_logprobs
        )


@dataclass(frozen=True)
class Actors:
    """The models that a rollout needs, and how they compute."""

    policy: PreTrainedModel
    reference: PreTrainedModel | None
    """None: KL is not measured and counts as 0."""
    scorer: Scorer
    codec: Codec
    microbatch_size: int | None
    precision: Precision
    """Of the arithmetic that policy, sampler and reference share."""


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
    precision: Precision = "float32",
) -> Sampled:
    """One response to each of the prompts at ``indices``.

    Args:
        precision: of the arithmetic; that of training where the policy learns from the responses.
    """
    prompt_ids = [prompts.ids[index] for index in indices]
    limit = codec.generation.max_response_tokens

    def told(ended: int, token: int) -> None:
        progress.phase("sampling", ended, len(prompt_ids), note=f"token {token} of {limit}")

    with autocast(precision, policy.device):
        samples = sample(
            policy,
            prompt_ids,
            max_new_tokens=limit,
            temperature=codec.generation.temperature,
            eos_token_ids=codec.stop_token_ids,
            pad_token_id=codec.pad_token_id,
            seed=seed,
            greedy=greedy,
            microbatch_size=microbatch_size,
            told=told,
        )
    sequences = collate(prompt_ids, samples.responses, pad_token_id=codec.pad_token_id)
    return Sampled(
        prompts=[prompts.texts[index] for index in indices],
        answers=[prompts.answers[index] for index in indices],
        responses=decode_all(codec.tokenizer, samples.responses),
        sequences=sequences.to(policy.device),
        ended=torch.tensor(samples.ended, device=policy.device),
        sampler_logprobs=padded(map(torch.tensor, samples.logprobs)).to(policy.device),
    )


def padded(rows: Iterable[Tensor]) -> Tensor:
    """Rows of any lengths as one (B,T), 0 behind the end of each."""
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def sample_and_score(
    actors: Actors, prompts: Prompts, indices: Sequence[int], *, seed: int, greedy: bool = False
) -> Scored:
    """One response to each of the prompts at ``indices``, and what it is worth as a whole."""
    sampled = sample_responses(
        actors.policy,
        actors.codec,
        prompts,
        indices,
        seed=seed,
        microbatch_size=actors.microbatch_size,
        greedy=greedy,
        precision=actors.precision,
    )
    scores = score(
        actors.scorer,
        sampled.sequences,
        prompts=sampled.prompts,
        responses=sampled.responses,
        answers=sampled.answers,
        ended=sampled.ended,
        microbatch_size=actors.microbatch_size,
    )
    return Scored(sampled=sampled, scores=scores)


def shape(
    actors: Actors,
    scored: Scored,
    *,
    returns: Returns,
    moments: RunningMoments | None = None,
    kl_coef: float | None = None,
    value_head: nn.Linear | None = None,
    with_final_values: bool = False,
) -> Rollout:
    """One reward per token: −β·KL on each, the scaled score on the last.

    Args:
        moments: of the scores so far, these included; read where ``returns`` scales.
        kl_coef: β as a controller has it now; None: that of ``returns``.
        value_head: on the policy's trunk, whose one pass then gives values too.
        with_final_values: those after the last token of each response among them.
    """
    sequences, reference = scored.sampled.sequences, actors.reference
    wants_full_kl = returns.kl_kind == "full" and returns.kl_coef
    said = rollout_logprobs(
        actors.policy,
        sequences,
        actors,
        reference=reference if wants_full_kl else None,
        value_head=value_head,
        with_final_values=with_final_values,
    )
    ref_logprobs = said.ref_logprobs
    if reference is not None and ref_logprobs is None:
        ref_logprobs = rollout_logprobs(reference, sequences, actors).logprobs
    rollout = paid(
        scored,
        said.logprobs,
        ref_logprobs,
        said.full_kl,
        returns=returns,
        moments=moments,
        kl_coef=returns.kl_coef if kl_coef is None else kl_coef,
        max_length=actors.codec.generation.max_response_tokens,
    )
    return replace(rollout, values=said.values, final_values=said.final_values)


def paid(
    scored: Scored,
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    full_kl: Tensor | None = None,
    *,
    returns: Returns,
    moments: RunningMoments | None,
    kl_coef: float,
    max_length: int,
) -> Rollout:
    """The rollout whose policy and reference say this of its tokens, (B,T) each; ``full_kl`` for that kind of KL."""
    kl = torch.zeros_like(logprobs)
    if full_kl is not None:
        kl = full_kl
    elif ref_logprobs is not None and returns.kl_kind != "full":
        kl = kl_estimate(logprobs, ref_logprobs, kind=returns.kl_kind)
    scaled_scores = scale(scored, returns, moments, max_length=max_length)
    mask = scored.sampled.sequences.response_mask
    return Rollout(
        sampled=scored.sampled,
        scores=scored.scores,
        scaled_scores=scaled_scores,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        kl=kl,
        kl_coef=kl_coef,
        rewards=shape_rewards(scaled_scores, kl, mask, kl_coef=kl_coef),
    )


def scale(scored: Scored, returns: Returns, moments: RunningMoments | None, *, max_length: int) -> Tensor:
    """The scores (B,) scaled by the moments, clipped, and less what a response loses by its length (DAPO)."""
    scores = scored.scores.total
    if returns.reward_scaling != "none":
        assert moments is not None
        scores = scale_scores(scores, moments, subtract_mean=returns.reward_scaling == "normalise", clip=None)
    if returns.reward_clip is not None:
        scores = scores.clamp(-returns.reward_clip, returns.reward_clip)
    if returns.overlong_buffer is not None:
        buffer = max(1, round(returns.overlong_buffer * max_length))
        lengths = scored.sampled.sequences.lengths
        scores = scores + overlong_penalty(lengths, max_length=max_length, buffer=buffer)
    return scores


def rollout_logprobs(
    model: PreTrainedModel,
    sequences: Sequences,
    actors: Actors,
    *,
    reference: PreTrainedModel | None = None,
    value_head: nn.Linear | None = None,
    with_final_values: bool = False,
) -> LogProbs:
    """What ``response_logprobs`` says of whole rollouts (B,T), in the numerics that training uses."""

    def said(micro: Sequences) -> dict[str, Tensor]:
        with autocast(actors.precision, micro.input_ids.device):
            found = response_logprobs(
                model,
                micro,
                temperature=actors.codec.generation.temperature,
                reference=reference,
                value_head=value_head,
                with_final_values=with_final_values,
            )
        return {name: tokens for name, tokens in vars(found).items() if tokens is not None}

    return LogProbs(
        **per_token(
            said, sequences, microbatch_size=actors.microbatch_size, computes="computing log-probabilities"
        )
    )


def rollout_values(critic: ScalarModel, sequences: Sequences, actors: Actors) -> Tensor:
    """Values (B,T) of the prefixes that chose each token, in the numerics that training uses."""

    def predicted(micro: Sequences) -> dict[str, Tensor]:
        with autocast(actors.precision, micro.input_ids.device):
            return {"values": values(critic, micro)}

    gathered = per_token(
        predicted, sequences, microbatch_size=actors.microbatch_size, computes="computing values"
    )
    return gathered["values"]


def rollout_values_and_final(
    critic: ScalarModel, sequences: Sequences, actors: Actors
) -> tuple[Tensor, Tensor]:
    """``rollout_values``, and the value (B,) of each whole response, from the same pass."""

    def predicted(micro: Sequences) -> dict[str, Tensor]:
        with autocast(actors.precision, micro.input_ids.device):
            found, final = values_and_final(critic, micro)
        return {"values": found, "final_values": final}

    gathered = per_token(
        predicted, sequences, microbatch_size=actors.microbatch_size, computes="computing values"
    )
    return gathered["values"], gathered["final_values"]


@torch.no_grad()
def per_token(
    compute: Callable[[Sequences], dict[str, Tensor]],
    sequences: Sequences,
    *,
    microbatch_size: int | None,
    computes: str,
) -> dict[str, Tensor]:
    """``compute`` over micro-batches, its results gathered into float32: (b,T) into (B,T) with 0 outside the mask, and
    one number for each response, (b,), into (B,).

    ``computes`` is what progress calls it.
    """
    gathered: dict[str, Tensor] = {}
    for rows in chunks(len(sequences), microbatch_size):
        progress.phase(computes, rows.start, len(sequences))
        micro = sequences.select(rows)
        for name, found in compute(micro).items():
            per_response = found.dim() == 1
            if name not in gathered:
                shape = (len(sequences),) if per_response else sequences.response_ids.shape
                gathered[name] = torch.zeros(shape, device=found.device)
            if per_response:
                gathered[name][rows] = found.float()
            else:
                kept = found.float().masked_fill(~micro.response_mask, 0.0)
                gathered[name][rows, : found.shape[1]] = kept
    return gathered


def sequence_sums(per_token_values: Tensor, response_mask: Tensor) -> Tensor:
    """Sums over each response's tokens, (B,T) → (B,)."""
    return per_token_values.masked_fill(~response_mask, 0.0).sum(dim=1)
