"""Policy optimisation: PPO in the form that the recipe's switches describe, from PPO to VAPO.

One iteration, top to bottom: sample, score, shape, estimate advantages, update policy and critic.
"""

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor
from transformers import PreTrainedModel

from algorithms.advantages import gae, length_adaptive_lambda, monte_carlo_returns, whiten
from algorithms.aggregation import aggregate, denominator_of
from algorithms.diagnostics import explained_variance
from algorithms.policy_loss import clipped_surrogate, positive_example_nll
from algorithms.value_loss import value_loss
from models.folders import load_policy, save_policy, tokenizer_digest
from models.heads import ScalarModel, load_critic, values
from models.logprobs import response_logprobs
from schemas.algorithm import Algorithm
from schemas.job import StageJob, StageResult
from schemas.recipe import PolicyOptimization
from tasks.attempt import Attempt, weights_of
from tasks.examples import Prompts, codec_of, read_prompts
from tasks.metric_sums import MetricSums, means_of
from tasks.minibatches import minibatches
from tasks.optimization import (
    TrainingDiverged,
    autocast,
    chunks,
    frozen_dtype,
    make_optimizer,
    training_device,
    update_weights,
)
from tasks.rollouts import (
    Actors,
    Rollout,
    collect,
    prompts_of_iteration,
    rollout_values,
    sequence_sums,
)
from tasks.scoring import load_scorer
from tasks.seeds import derive_seed
from tasks.splits import TRAIN, VALIDATION
from tasks.verifiers import VERIFIERS

RATIO_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""How far the mean ratio of a rollout's first update may stand from 1 before something is wrong."""


@dataclass(frozen=True)
class Estimates:
    """What a rollout's updates learn from: ``old_values``, ``advantages``, ``targets`` (B,T), ``is_positive`` (B,)."""

    old_values: Tensor
    advantages: Tensor
    targets: Tensor
    is_positive: Tensor


def run(job: StageJob) -> StageResult:
    """Optimise ``init`` against ``reward`` on ``prompts``; the artifact is the best policy by validation score."""
    work = job.work
    assert isinstance(work, PolicyOptimization)
    device = training_device()

    # 1. Policy, reference, critic and reward
    codec = codec_of(job, "init")
    frozen = frozen_dtype(work.precision)
    policy = load_policy(job.inputs["init"]).to(device)
    critic = load_critic(job.inputs["critic"], seed=derive_seed(job.seed, "init")).to(device)
    actors = Actors(
        policy=policy,
        reference=load_policy(job.inputs["reference"], dtype=frozen).to(device),
        scorer=load_scorer(job, work.reward, tokenizer_of="init", device=device, dtype=frozen),
        codec=codec,
        microbatch_size=work.microbatch_size,
        precision=work.precision,
    )
    optimizers = {
        "policy": make_optimizer(policy, weight_decay=work.weight_decay),
        "critic": make_optimizer(critic, weight_decay=work.weight_decay),
    }
    train, validation = (read_prompts(job.inputs["prompts"], split, codec) for split in (TRAIN, VALIDATION))

    with Attempt(
        job,
        total=work.iterations,
        modules={"policy": policy, "critic": critic},
        optimizers=optimizers,
        state={"best": None, "best_iteration": 0},
        keeps_best=True,
    ) as attempt:
        if not attempt.best:
            keep_if_best(attempt, job, actors, validation, iteration=0)
        for iteration in attempt.remaining():
            # 2. Sample responses and shape their rewards
            indices = prompts_of_iteration(
                iteration,
                num_responses=work.batch_size,
                samples_per_prompt=work.algorithm.samples_per_prompt,
                num_prompts=len(train),
                seed=job.seed,
            )
            seed = derive_seed(job.seed, "sampling", iteration)
            rollout = collect(actors, train, indices, kl_coef=work.algorithm.kl_coef, seed=seed)

            # 3. Advantages for the policy, targets for the critic
            old_values = rollout_values(critic, rollout.sequences, actors)
            estimates = estimate(rollout, old_values, work.algorithm)

            # 4. Update both
            metrics = update(policy, critic, optimizers, rollout, estimates, job, work, iteration=iteration)
            metrics |= describe(rollout, old_values, work.algorithm)

            # 5. Keep the policy that scores best on validation prompts
            if (iteration + 1) % work.validate_every == 0 or iteration + 1 == work.iterations:
                metrics |= keep_if_best(attempt, job, actors, validation, iteration=iteration + 1)
            attempt.finish_step(
                metrics, num_tokens=int(rollout.sequences.attention_mask.sum()), headline="score_mean"
            )
        policy.load_state_dict(attempt.best)

    # 6. What the best policy is like
    measured = measure(job, actors, validation)
    save_policy(policy, codec.tokenizer, job.output)
    return StageResult(
        metrics={
            **measured,
            "best_iteration": attempt.state["best_iteration"],
            "prompts_too_long": train.num_too_long,
        },
        tokenizer_digest=tokenizer_digest(job.output),
    )


def estimate(rollout: Rollout, old_values: Tensor, algorithm: Algorithm) -> Estimates:
    """Advantages by GAE with λ_policy, critic targets with λ_value, from the same values (decoupled GAE)."""
    mask = rollout.sequences.response_mask
    lam: float | Tensor = algorithm.lambda_policy
    if algorithm.length_adaptive_alpha is not None:
        lam = length_adaptive_lambda(rollout.sequences.lengths, alpha=algorithm.length_adaptive_alpha)
    advantages = gae(rollout.rewards, old_values, mask, gamma=algorithm.gamma, lam=lam)
    if algorithm.whiten_advantages:
        advantages = whiten(advantages, mask)
    value_advantages = gae(
        rollout.rewards, old_values, mask, gamma=algorithm.gamma, lam=algorithm.lambda_value
    )
    return Estimates(
        old_values=old_values,
        advantages=advantages,
        targets=value_advantages + old_values,
        is_positive=held_to_be_right(rollout, algorithm),
    )


def held_to_be_right(rollout: Rollout, algorithm: Algorithm) -> Tensor:
    """Which responses (B,) the positive-example loss imitates: by a verifier, or by a score threshold."""
    if not algorithm.positive_nll_coef:
        return torch.zeros_like(rollout.scores, dtype=torch.bool)
    if algorithm.positive_verifier is not None:
        verify = VERIFIERS[algorithm.positive_verifier]
        verdicts = [
            verify(*pair) for pair in zip(rollout.sampled.prompts, rollout.sampled.responses, strict=True)
        ]
        return torch.tensor(verdicts, device=rollout.scores.device)
    return rollout.scores >= algorithm.positive_threshold


def update(
    policy: PreTrainedModel,
    critic: ScalarModel,
    optimizers: dict[str, torch.optim.AdamW],
    rollout: Rollout,
    estimates: Estimates,
    job: StageJob,
    work: PolicyOptimization,
    *,
    iteration: int,
) -> dict[str, float]:
    """All optimiser steps of one rollout; returns the means of their metrics, and the first ratio's deviation."""
    peaks = {"policy": (policy, work.learning_rate), "critic": (critic, work.critic_learning_rate)}
    cut = list(minibatches(rollout.sequences, work, seed=job.seed, iteration=iteration))
    steps: list[dict[str, float]] = []
    for number, rows in enumerate(cut):
        metrics = accumulate_losses(policy, critic, rollout, estimates, rows, job, work)
        if number == 0:
            check_first_ratio(abs(metrics["ratio"] - 1.0), work.precision)
        for name, (module, peak) in peaks.items():
            rates = update_weights(
                optimizers[name],
                module,
                work,
                step=iteration * len(cut) + number,
                total_steps=work.iterations * len(cut),
                peak=peak,
            )
            metrics |= {f"{rate}_{name}": value for rate, value in rates.items()}
        steps.append(metrics)
    return {**means_of(steps), "ratio_deviation_first": abs(steps[0]["ratio"] - 1.0)}


def accumulate_losses(
    policy: PreTrainedModel,
    critic: ScalarModel,
    rollout: Rollout,
    estimates: Estimates,
    rows: Tensor,
    job: StageJob,
    work: PolicyOptimization,
) -> dict[str, float]:
    """Add the gradients of one minibatch to policy and critic, micro-batch by micro-batch; returns its metrics.

    Every denominator is the whole minibatch's, so micro-batches change nothing but memory.
    """
    algorithm, sequences = work.algorithm, rollout.sequences
    minibatch_mask = sequences.response_mask[rows]
    positive_mask = minibatch_mask & estimates.is_positive[rows, None]
    denominator = denominator_of(
        minibatch_mask, aggregation=algorithm.aggregation, max_length=job.generation.max_response_tokens
    )
    num_tokens, num_positive_tokens = int(minibatch_mask.sum()), int(positive_mask.sum())

    sums = MetricSums()
    losses = dict.fromkeys(("policy_loss", "value_loss", "entropy"), 0.0)
    for part in chunks(len(rows), work.microbatch_size):
        micro_rows = rows[part]
        micro = sequences.select(micro_rows)
        mask, width = micro.response_mask, micro.response_ids.shape[1]

        # Policy: surrogate, imitation of its right responses, entropy
        with autocast(work.precision, mask.device):
            predicted = response_logprobs(
                policy,
                micro,
                temperature=job.generation.temperature,
                with_entropy=True,
            )
        surrogate = clipped_surrogate(
            predicted.logprobs,
            rollout.logprobs[micro_rows, :width],
            estimates.advantages[micro_rows, :width],
            mask,
            clip_range_low=algorithm.clip_range_low,
            clip_range_high=algorithm.clip_range_high,
            aggregation=algorithm.aggregation,
            denominator=denominator,
        )
        imitation = positive_example_nll(
            predicted.logprobs,
            mask,
            estimates.is_positive[micro_rows],
            denominator=num_positive_tokens,
        )
        assert predicted.entropy is not None
        entropy = aggregate(
            predicted.entropy, mask, aggregation=algorithm.aggregation, denominator=denominator
        )
        policy_loss = (
            surrogate.loss + algorithm.positive_nll_coef * imitation.loss - algorithm.entropy_coef * entropy
        )
        policy_loss.backward()

        # Critic: squared error against its targets
        with autocast(work.precision, mask.device):
            new_values = values(critic, micro)
        regression = value_loss(
            new_values.float(),
            estimates.old_values[micro_rows, :width],
            estimates.targets[micro_rows, :width],
            mask,
            value_clip_range=algorithm.value_clip_range,
            denominator=num_tokens,
        )
        regression.loss.backward()

        for loss in (surrogate, imitation, regression):
            sums.add(loss)
        losses["policy_loss"] += policy_loss.item()
        losses["value_loss"] += regression.loss.item()
        losses["entropy"] += float(predicted.entropy.detach()[mask].sum()) / num_tokens

    for name, loss_value in losses.items():
        if not isfinite(loss_value):
            raise TrainingDiverged(f"{name} is {loss_value}; lower the learning rate, or look at the rollout")
    return {**sums.means(), **losses}


def check_first_ratio(deviation: float, precision: str) -> None:
    """Before any update the policy is the one that sampled: its ratio is 1 but for rounding."""
    if deviation > RATIO_TOLERANCE[precision]:
        raise TrainingDiverged(
            f"the mean ratio at a rollout's first update is off 1 by {deviation:.2g} (rounding allows "
            f"{RATIO_TOLERANCE[precision]:g}): the policy that trains is not the one that sampled"
        )


def describe(rollout: Rollout, old_values: Tensor, algorithm: Algorithm) -> dict[str, float]:
    """What a rollout was like, before its updates."""
    mask = rollout.sequences.response_mask
    returns = monte_carlo_returns(rollout.rewards, mask, gamma=algorithm.gamma)
    terms = {f"score_mean_{name}": term.mean().item() for name, term in rollout.term_scores.items()}
    return {
        "score_mean": rollout.scores.mean().item(),
        **terms,
        "reward_mean": sequence_sums(rollout.rewards, mask).mean().item(),
        "kl_to_reference": sequence_sums(rollout.kl, mask).mean().item(),
        "explained_variance": explained_variance(old_values, returns, mask),
        "positive_share": held_to_be_right(rollout, algorithm).float().mean().item(),
        "response_length_mean": rollout.sequences.lengths.float().mean().item(),
        "truncated_share": (~rollout.sampled.ended).float().mean().item(),
    }


def keep_if_best(
    attempt: Attempt, job: StageJob, actors: Actors, validation: Prompts, *, iteration: int
) -> dict[str, float]:
    """Score the policy on validation prompts; remember its weights when it scores best. Returns what to log."""
    measured = measure(job, actors, validation)["validation_score"]
    best = attempt.state["best"]
    if best is None or measured > best:
        attempt.state |= {"best": measured, "best_iteration": iteration}
        attempt.best = weights_of(actors.policy)
    return {"validation_score": measured}


def measure(job: StageJob, actors: Actors, validation: Prompts) -> dict[str, float]:
    """Responses to validation prompts, always sampled from the same stream: score, KL (nats), length (tokens)."""
    assert isinstance(job.work, PolicyOptimization)
    indices = [index % len(validation) for index in range(job.work.validation_samples)]
    rollout = collect(
        actors, validation, indices, kl_coef=0.0, seed=derive_seed(job.seed, "validation sampling")
    )
    return {
        "validation_score": rollout.scores.mean().item(),
        "kl_to_reference": sequence_sums(rollout.kl, rollout.sequences.response_mask).mean().item(),
        "mean_response_length": rollout.sequences.lengths.float().mean().item(),
        "truncated_share": (~rollout.sampled.ended).float().mean().item(),
    }
