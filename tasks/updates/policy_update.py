"""Take all optimiser steps of one rollout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from vantage.schemas.recipe.resolved import ResolvedPolicyOptimization
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.examples import Codec, Completions, read_completions
from vantage.tasks.data.splits import TRAIN
from vantage.tasks.rollout.minibatches import OptimizerSteps, Step
from vantage.tasks.rollout.rollouts import Rollout
from vantage.tasks.rollout.sampler_check import check_gap
from vantage.tasks.training.data_order import DataOrder
from vantage.tasks.training.metric_sums import means_of
from vantage.tasks.training.optimization import update_weights
from vantage.tasks.training.seeds import derive_seed, stage_seed
from vantage.tasks.updates.actor_critic import ActorCritic
from vantage.tasks.updates.covariances import with_selected_tokens
from vantage.tasks.updates.estimates import Estimates
from vantage.tasks.updates.policy_losses import (
    Coefficients,
    Minibatch,
    accumulate_losses,
    minibatch_of,
    surrogate_and_old_kl,
)
from vantage.tasks.updates.trust_region import guarded_step


@dataclass(frozen=True)
class Ptx:
    """Demonstrations that are imitated in addition, as many in each step as the minibatch has responses."""

    examples: Completions
    order: DataOrder


def read_ptx(job: StageJob[ResolvedPolicyOptimization], codec: Codec) -> Ptx | None:
    """Read the demonstrations whose NLL is added to the policy's loss, if the recipe names some."""
    work = job.work
    if not work.algorithm.ptx_coef:
        return None
    examples = read_completions(job.inputs["ptx"], TRAIN, ["response"], codec)
    order = DataOrder(
        num_examples=len(examples), batch_size=work.minibatch_size, seed=derive_seed(stage_seed(job), "ptx")
    )
    return Ptx(examples, order)


def update(
    networks: ActorCritic,
    rollout: Rollout,
    estimates: Estimates,
    job: StageJob[ResolvedPolicyOptimization],
    *,
    iteration: int,
    coefs: Coefficients,
    learning: tuple[str, ...] = ("policy", "critic"),
    ptx: Ptx | None = None,
) -> dict[str, float]:
    """Take every epoch's steps of the networks that learn; returns the means of their metrics, and the first ratio's deviation.

    Raises:
        TrainingDiverged: a loss or gradient is not finite.
        SamplerDisagrees: the ratios of the first step differ from 1 by more than rounding, although the present policy sampled
            the rollout.
    """
    work = job.work
    device = rollout.logprobs.device
    max_length = job.generation.max_response_tokens
    described: list[dict[str, float]] = []
    undone = 0
    steps = OptimizerSteps(rollout.sequences, work, seed=stage_seed(job), iteration=iteration)
    for step in steps:
        minibatch = minibatch_of(rollout, estimates, step.rows.to(device), work, max_length=max_length)
        if "policy" in learning:
            minibatch = with_selected_tokens(
                networks, minibatch, work, seed=stage_seed(job), step=step.number
            )
        demonstrations = ptx.examples.batch(ptx.order.batch(step.number)).to(device) if ptx else None
        metrics = accumulate_losses(
            networks,
            minibatch,
            work,
            coefs=coefs,
            learning=learning,
            ptx=demonstrations,
        )
        if not described and not rollout.is_one_step_old:
            check_gap("ratio_deviation_first", metrics.get("ratio_deviation", 0.0), work.arithmetic)
        taken_back = step_all(networks, learning, minibatch, work, metrics, step=step)
        undone += taken_back.steps
        described.append(metrics)
        if "critic" in learning:
            described += more_critic_steps(networks, minibatch, work, step=step)
        if taken_back.stops_epoch or is_too_far(metrics, work):
            steps.end_epoch()
    means = means_of(described)
    if "policy" in learning:  # otherwise no ratio was computed
        if not rollout.is_one_step_old:  # a minibatch whose responses are all filtered out has no ratio
            means["ratio_deviation_first"] = described[0].get("ratio_deviation", 0.0)
        if work.algorithm.trust_region_kl is not None:
            means["trust_region_undone"] = undone
    return means


EPOCH_KL_FACTOR = 1.5
"""Multiple of its target that KL(old‖new) may reach before the epoch ends, as in public implementations of PPO."""


def is_too_far(metrics: Mapping[str, float], work: ResolvedPolicyOptimization) -> bool:
    """Return whether the policy had moved so far before this step that the recipe ends the epoch."""
    target = work.algorithm.epoch_kl_target
    return target is not None and metrics.get("approx_kl", 0.0) > EPOCH_KL_FACTOR * target


def more_critic_steps(
    networks: ActorCritic, minibatch: Minibatch, work: ResolvedPolicyOptimization, *, step: Step
) -> list[dict[str, float]]:
    """Take the critic's further steps on a minibatch after its first one, at the same learning rate."""
    described = []
    for _ in range(work.algorithm.critic_steps - 1):
        metrics = accumulate_losses(networks, minibatch, work, coefs=Coefficients(), learning=("critic",))
        step_all(networks, ("critic",), minibatch, work, metrics, step=step)
        described.append(metrics)
    return described


@dataclass(frozen=True)
class TakenBack:
    """Outcome of the trust-region guard for one step."""

    steps: int = 0
    stops_epoch: bool = False


def step_all(
    networks: ActorCritic,
    learning: Sequence[str],
    minibatch: Minibatch,
    work: ResolvedPolicyOptimization,
    metrics: dict[str, float],
    *,
    step: Step,
) -> TakenBack:
    """Take a step with the accumulated gradients of the networks that learn, the policy's under guard; adds rates to
    ``metrics``."""
    taken_back, limit = TakenBack(), work.algorithm.trust_region_kl
    for name in (each for each in networks.optimizers if each in learning):
        take = partial(_take, networks, name, work, step)
        if name == "policy" and limit is not None:
            guarded = guarded_step(
                take,
                partial(surrogate_and_old_kl, networks, minibatch, work),
                networks.modules[name],
                networks.optimizers[name],
                surrogate_before=metrics["surrogate_loss"],
                max_kl=limit,
                halvings=work.algorithm.trust_region_halvings,
            )
            rates = guarded.metrics
            taken_back = TakenBack(guarded.undone, stops_epoch=not guarded.accepted)
        else:
            rates = take(1.0)
        metrics |= {f"{rate}_{name}": value for rate, value in rates.items()}
    return taken_back


def _take(
    networks: ActorCritic, name: str, work: ResolvedPolicyOptimization, step: Step, share: float
) -> dict[str, float]:
    """Take one optimiser step with a share of its learning rate."""
    return update_weights(
        networks.optimizers[name],
        networks.modules[name],
        work,
        step=step.number,
        total_steps=step.total,
        peak=share * networks.learning_rates[name],
        warmup_steps=0 if name == "critic" and work.critic_optimizer == "carry" else None,
    )


def kl_to_old(
    networks: ActorCritic, rollout: Rollout, estimates: Estimates, work: ResolvedPolicyOptimization
) -> float:
    """Return KL(old‖new) in nats per token over the whole rollout, after its updates, for KLPEN's controller."""
    rows = torch.arange(len(rollout.sequences), device=rollout.logprobs.device)
    whole = minibatch_of(
        rollout, estimates, rows, work, max_length=networks.models.codec.generation.max_response_tokens
    )
    return surrogate_and_old_kl(networks, whole, work)[1]
