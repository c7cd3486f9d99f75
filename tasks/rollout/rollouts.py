"""Sample responses from a policy, and compute the rewards that its critic and its update learn from."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vantage.algorithms.importance import ImportanceWeights
from vantage.algorithms.kl import kl_estimate
from vantage.algorithms.rewards import (
    RunningMoments,
    overlong_penalty,
    scale_scores,
    shape_rewards,
)
from vantage.models.heads import ScalarModel, values, values_and_final
from vantage.models.logprobs import LogProbs
from vantage.models.policy import PolicyModel
from vantage.models.sequences import Sequences, collate
from vantage.schemas.conversations import Message
from vantage.schemas.recipe.algorithm import Returns
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.tasks.data.examples import Codec, Prompts
from vantage.tasks.rewards.scoring import Scorer, Scores, score
from vantage.tasks.rollout.engine import RolloutEngine
from vantage.tasks.rollout.rollout_models import RolloutModels
from vantage.tasks.rollout.scored_meanwhile import scored_meanwhile
from vantage.tasks.training import progress, ranks
from vantage.tasks.training.data_order import DataOrder
from vantage.tasks.training.offloading import on_device
from vantage.tasks.training.optimization import autocast
from vantage.tasks.training.passes import passes_of


@dataclass(frozen=True)
class Sampled:
    """Responses to prompts: as text, as ids, and whether each ended by itself (B,)."""

    prompts: list[str]
    answers: list[str | None]
    """Answers of the prompts' rows, for verifiers."""
    responses: list[str]
    sequences: Sequences
    ended: Tensor
    sampler_logprobs: Tensor
    """(B,T): log-probability of each token by the engine when it drew it, in nats; 0 outside the mask."""
    conversations: list[list[Message] | None] | None = None
    """Turns of prompts that are conversations; None: no prompt is one, or nothing reads them."""

    def select(self, rows: Sequence[int]) -> "Sampled":
        """Return the responses at ``rows``, in that order."""
        places = torch.tensor(rows, device=self.ended.device)
        sequences = self.sequences.select(places)
        return Sampled(
            prompts=[self.prompts[row] for row in rows],
            answers=[self.answers[row] for row in rows],
            responses=[self.responses[row] for row in rows],
            sequences=sequences,
            ended=self.ended[places],
            sampler_logprobs=self.sampler_logprobs[places, : sequences.response_ids.shape[1]],
            conversations=None if self.conversations is None else [self.conversations[row] for row in rows],
        )


@dataclass(frozen=True)
class Scored:
    """Sampled responses with their scores, before any scaling and KL."""

    sampled: Sampled
    scores: Scores

    def select(self, rows: Sequence[int]) -> "Scored":
        """Return the responses at ``rows``, in that order."""
        places = torch.tensor(rows, device=self.sampled.ended.device)
        sampled = self.sampled.select(rows)
        width = sampled.sequences.response_ids.shape[1]
        return Scored(sampled=sampled, scores=self.scores.select(places, width=width))


@dataclass(frozen=True)
class Rollout:
    """Sampled responses with everything that was fixed when they were sampled."""

    sampled: Sampled
    scores: Scores
    scaled_scores: Tensor
    """(B,): scores scaled, clipped and shaped by length as ``Returns`` asks; they are a part of the last token's
    reward."""
    logprobs: Tensor
    """(B,T): log-probabilities of the sampling policy."""
    ref_logprobs: Tensor | None
    """(B,T): log-probabilities of the reference, if there is one."""
    kl: Tensor
    """(B,T): KL to the reference of the kind that the reward counts; 0 without a reference."""
    kl_coef: float
    rewards: Tensor
    """(B,T): −kl_coef · kl on every token, and the scaled score on the last."""
    values: Tensor | None = None
    """(B,T): values of the value head on the sampling policy's trunk, if there is one."""
    final_values: Tensor | None = None
    """(B,): values of the head at the last token of each response, if asked for."""
    importance: ImportanceWeights | None = None
    """(B,T): weights of the advantages, if the responses may come from an earlier policy."""
    is_one_step_old: bool = False
    """Whether ``logprobs`` are those of the policy before its last update, so that no ratio begins at 1. With dynamic
    sampling this holds only for the first round; the ratios of the other rounds begin at 1."""

    @property
    def sequences(self) -> Sequences:
        """Ids that were sampled."""
        return self.sampled.sequences

    @property
    def log_ratios(self) -> Tensor:
        """(B,T): log π − log π_ref of each sampled token (k1), in nats; 0 without a reference."""
        return (
            torch.zeros_like(self.logprobs)
            if self.ref_logprobs is None
            else self.logprobs - self.ref_logprobs
        )


def prompts_of_iteration(
    iteration: int,
    *,
    num_responses: int,
    samples_per_prompt: int,
    num_prompts: int,
    seed: int,
    easiness: Sequence[float] | None = None,
) -> list[int]:
    """Return indices of the prompts of one rollout, each of which is sampled ``samples_per_prompt`` times.

    ``easiness``: numbers by which the prompts are ordered in each pass over them, the largest first.
    """
    order = DataOrder(
        num_examples=num_prompts,
        batch_size=num_responses // samples_per_prompt,
        seed=seed,
        easiness=easiness,
    )
    return order.batch(iteration)


def sample_responses(
    engine: RolloutEngine,
    codec: Codec,
    prompts: Prompts,
    indices: Sequence[int],
    *,
    device: torch.device,
    seed: int,
    count: int = 1,
    greedy: bool = False,
    scorer: Scorer | None = None,
) -> Sampled:
    """Sample ``count`` responses to each of the prompts at ``indices``, those to one prompt adjacent, on ``device``.

    ``scorer``: the scorer of the responses, which may begin with the first while others are sampled.
    """
    prompt_ids = [prompts.ids[index] for index in indices]
    repeated = [index for index in indices for _ in range(count)]
    listener = None if scorer is None else scored_meanwhile(scorer, codec, prompts, repeated)
    try:
        samples = engine.generate(prompt_ids, count=count, seed=seed, greedy=greedy, listener=listener)
    except BaseException:
        if listener is not None:
            listener.give_up()
        raise
    rows = [index for index in indices for _ in range(count)]
    sequences = collate(
        [prompts.ids[index] for index in rows], samples.responses, pad_token_id=codec.pad_token_id
    )
    return Sampled(
        prompts=[prompts.texts[index] for index in rows],
        answers=[prompts.answers[index] for index in rows],
        responses=codec.response_texts(samples.responses),
        sequences=sequences.to(device),
        ended=torch.tensor(samples.ended, device=device),
        sampler_logprobs=padded(map(torch.tensor, samples.logprobs)).to(device),
        conversations=None
        if prompts.conversations is None
        else [prompts.conversations[index] for index in rows],
    )


def begin_sampling(
    models: RolloutModels, prompts: Prompts, indices: Sequence[int], *, seed: int, count: int
) -> None:
    """Let the engine begin with the responses for a later ``sample_and_score`` with the same arguments, and let
    verifiers and servers begin with their scores."""
    repeated = [index for index in indices for _ in range(count)]
    scorer = models.scorer
    listener = None if scorer is None else scored_meanwhile(scorer, models.codec, prompts, repeated)
    models.engine.begin(
        [prompts.ids[index] for index in indices],
        count=count,
        seed=seed,
        listener=None if listener is None else listener.in_thread(),
    )


def padded(rows: Iterable[Tensor]) -> Tensor:
    """Return rows of any lengths as one (B,T), with 0 after the end of each."""
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def sample_and_score(
    models: RolloutModels,
    prompts: Prompts,
    indices: Sequence[int],
    *,
    seed: int,
    count: int = 1,
    greedy: bool = False,
) -> Scored:
    """Sample ``count`` adjacent responses to each of the prompts at ``indices``, and score each response as a whole."""
    sampled = sample_responses(
        models.engine,
        models.codec,
        prompts,
        indices,
        device=models.policy.device,
        seed=seed,
        count=count,
        greedy=greedy,
        scorer=models.scorer,
    )
    assert models.scorer is not None, "a stage that samples scores what it sampled"
    scores = score(
        models.scorer,
        sampled.sequences,
        prompts=sampled.prompts,
        responses=sampled.responses,
        answers=sampled.answers,
        ended=sampled.ended,
        limits=models.limits,
        conversations=sampled.conversations,
    )
    return Scored(sampled=sampled, scores=scores)


def shape(
    models: RolloutModels,
    scored: Scored,
    *,
    returns: Returns,
    moments: RunningMoments | None = None,
    kl_coef: float | None = None,
    by_sampler: bool = False,
    with_values: bool = False,
    with_final_values: bool = False,
) -> Rollout:
    """Return the rollout with a reward for each token: −β·KL on each, and the scaled score on the last one.

    Args:
        by_sampler: take the sampler's log-probabilities, and make no pass of the policy unless something else needs it.
        moments: moments of the scores so far, including these; read if ``returns`` scales scores.
        kl_coef: present β of a controller; None: the β of ``returns``.
        with_values: also return the values of the head on the policy's trunk, from the same pass.
        with_final_values: also return the values after the last token of each response.
    """
    sequences, reference = scored.sampled.sequences, models.reference
    wants_full_kl = bool(returns.kl_kind == "full" and returns.kl_coef)
    policy = LogProbs(scored.sampled.sampler_logprobs)
    if with_values or wants_full_kl or not by_sampler:
        policy = rollout_logprobs(
            models.policy,
            sequences,
            models,
            reference=reference if wants_full_kl else None,
            with_values=with_values,
            with_final_values=with_final_values,
        )
    logprobs = scored.sampled.sampler_logprobs if by_sampler else policy.logprobs
    ref_logprobs = policy.ref_logprobs
    if reference is not None and ref_logprobs is None:
        ref_logprobs = rollout_logprobs(reference, sequences, models).logprobs
    rollout = build_rollout(
        scored,
        logprobs,
        ref_logprobs,
        policy.full_kl,
        returns=returns,
        moments=moments,
        kl_coef=returns.kl_coef if kl_coef is None else kl_coef,
        max_length=models.codec.generation.max_response_tokens,
    )
    return replace(rollout, values=policy.values, final_values=policy.final_values)


def build_rollout(
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
    """Return the rollout with these log-probabilities, (B,T) each; ``full_kl`` (B,T) if the reward counts that kind of
    KL."""
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
        rewards=_rewards(scored.scores, scaled_scores, kl, mask, kl_coef=kl_coef),
    )


def _rewards(scores: Scores, scaled: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
    """Return token rewards (B,T): the KL penalties, the scores of steps at their ends, and the rest of the scaled
    scores at the last token."""
    if scores.steps is None:
        return shape_rewards(scaled, kl, mask, kl_coef=kl_coef)
    at_the_end = scaled - scores.steps.sum(dim=1)
    return shape_rewards(at_the_end, kl, mask, kl_coef=kl_coef) + scores.steps


def scale(scored: Scored, returns: Returns, moments: RunningMoments | None, *, max_length: int) -> Tensor:
    """Return the scores (B,) of responses as they enter the rewards; see ``shape_scores``."""
    lengths = scored.sampled.sequences.lengths
    return shape_scores(scored.scores.learned(), lengths, returns, moments, max_length=max_length)


def shape_scores(
    scores: Tensor, lengths: Tensor, returns: Returns, moments: RunningMoments | None, *, max_length: int
) -> Tensor:
    """Return scores (N,) scaled by the moments, clipped, and less the penalty for lengths (N,) in tokens (DAPO)."""
    if returns.reward_scaling != "none":
        assert moments is not None
        scores = scale_scores(scores, moments, subtract_mean=returns.reward_scaling == "normalise", clip=None)
    if returns.reward_clip is not None:
        scores = scores.clamp(-returns.reward_clip, returns.reward_clip)
    if returns.overlong_buffer is not None:
        buffer = max(1, round(returns.overlong_buffer * max_length))
        scores = scores + overlong_penalty(lengths, max_length=max_length, buffer=buffer)
    return scores


def rollout_logprobs(
    model: PolicyModel,
    sequences: Sequences,
    models: RolloutModels,
    *,
    reference: PolicyModel | None = None,
    with_values: bool = False,
    with_final_values: bool = False,
) -> LogProbs:
    """Return log-probabilities of whole rollouts (B,T), and the other requested results, in the numerics of training."""

    def compute(micro: Sequences) -> dict[str, Tensor]:
        with autocast(models.precision, micro.input_ids.device):
            found: dict[str, Tensor] = model(
                micro,
                temperature=models.codec.generation.temperature,
                reference=reference,
                with_values=with_values,
                with_final_values=with_final_values,
            )
            return found

    with on_device(model):
        found = per_token(compute, sequences, limits=models.limits, computes="computing log-probabilities")
    return LogProbs(**found)


def rollout_values(critic: ScalarModel, sequences: Sequences, models: RolloutModels) -> Tensor:
    """Return values (B,T) of the prefixes that chose each token, in the numerics of training."""

    def compute(micro: Sequences) -> dict[str, Tensor]:
        with autocast(models.precision, micro.input_ids.device):
            return {"values": values(critic, micro)}

    gathered = per_token(compute, sequences, limits=models.limits, computes="computing values")
    return gathered["values"]


def rollout_values_and_final(
    critic: ScalarModel, sequences: Sequences, models: RolloutModels
) -> tuple[Tensor, Tensor]:
    """Return ``rollout_values``, and the value (B,) of each whole response, from the same pass."""

    def compute(micro: Sequences) -> dict[str, Tensor]:
        with autocast(models.precision, micro.input_ids.device):
            found, final = values_and_final(critic, micro)
        return {"values": found, "final_values": final}

    gathered = per_token(compute, sequences, limits=models.limits, computes="computing values")
    return gathered["values"], gathered["final_values"]


@torch.no_grad()
def per_token(
    compute: Callable[[Sequences], dict[str, Tensor]],
    sequences: Sequences,
    *,
    limits: PassLimits,
    computes: str,
) -> dict[str, Tensor]:
    """Run ``compute`` over the passes of all ranks, and gather its results into float32: (b,T) into (B,T) with 0 outside the mask, and
    one number for each response, (b,), into (B,).

    ``computes``: name of the computation in progress reports.
    """
    gathered: dict[str, Tensor] = {}
    for part in passes_of(sequences, limits):
        progress.phase(computes, part.done, len(sequences))
        micro = part.select(sequences)
        for name, found in compute(micro).items():
            per_response = found.dim() == 1
            if name not in gathered:
                shape = (len(sequences),) if per_response else sequences.response_ids.shape
                gathered[name] = torch.zeros(shape, device=found.device)
            part.put(
                found if per_response else found.masked_fill(~micro.response_mask, 0.0), into=gathered[name]
            )
    return {name: ranks.total(found) for name, found in gathered.items()}


def sequence_sums(per_token_values: Tensor, response_mask: Tensor) -> Tensor:
    """Return sums over each response's tokens, (B,T) → (B,)."""
    return per_token_values.masked_fill(~response_mask, 0.0).sum(dim=1)
