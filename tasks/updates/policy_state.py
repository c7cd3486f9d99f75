"""What moves with the checkpoints of policy optimisation beside the networks, and how the KL coefficients move."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from vantage.algorithms.kl import PenaltyController, ProportionalController
from vantage.algorithms.rewards import RunningMoments
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.resolved import ResolvedPolicyOptimization
from vantage.schemas.records.job import StageJob
from vantage.tasks.rollout.reward_moments import read_moments
from vantage.tasks.rollout.rollouts import Rollout, sequence_sums
from vantage.tasks.training.stage_state import ADDED_LATER, BestSoFar
from vantage.tasks.updates.actor_critic import critic_folder


@dataclass(frozen=True)
class PolicyState(BestSoFar):
    """What moves with the checkpoints beside the networks."""

    batches: int = 0
    """Batches of prompts that were sampled."""
    kl_coef: float = 0.0
    """β of the KL to the reference in the next rollout's rewards."""
    kl_penalty_coef: float = 0.0
    """β of the KL(old‖new) penalty in the next update."""
    moments: RunningMoments = field(default_factory=RunningMoments)
    """Of all scores so far."""
    critic_is_used: bool = field(default=True, metadata=ADDED_LATER)
    """Whether the last rollout's advantages were the critic's."""
    critic_weight_sum: float = field(default=0.0, metadata=ADDED_LATER)
    """Over the iterations."""


def with_updated_kl_coefs(
    state: PolicyState, rollout: Rollout, measure_kl: Callable[[], float], algorithm: Algorithm
) -> PolicyState:
    """Return the coefficients for the next rollout, moved by what the policy did in this one."""
    return replace(
        state,
        kl_coef=updated_kl_coef(state.kl_coef, rollout, algorithm),
        kl_penalty_coef=updated_kl_penalty_coef(state.kl_penalty_coef, measure_kl, algorithm),
    )


def updated_kl_penalty_coef(coef: float, measure_kl: Callable[[], float], algorithm: Algorithm) -> float:
    """Return KLPEN's β for the next rollout; ``measure_kl`` gives KL(old‖new), nats per token, and is called only where β adapts."""
    if algorithm.kl_penalty_target is None:
        return coef
    return PenaltyController(coef, target=algorithm.kl_penalty_target).update(measure_kl()).coef


def updated_kl_coef(kl_coef: float, rollout: Rollout, algorithm: Algorithm) -> float:
    """Return β for the next rollout: as it is, or moved towards the target KL (nats per response)."""
    if algorithm.kl_target is None:
        return kl_coef
    controller = ProportionalController(kl_coef, target=algorithm.kl_target, horizon=algorithm.kl_horizon)
    per_response = sequence_sums(rollout.log_ratios, rollout.sequences.response_mask)
    return controller.update(per_response.mean().item(), num_sequences=len(per_response)).coef


def initial_state(job: StageJob[ResolvedPolicyOptimization]) -> PolicyState:
    """Return the state before the first iteration; running moments come with the critic that was pretrained with them."""
    algorithm = job.work.algorithm
    critic = critic_folder(job) if algorithm.reads_critic else None
    return PolicyState(
        kl_coef=algorithm.kl_coef,
        kl_penalty_coef=algorithm.kl_penalty_coef,
        moments=read_moments(critic),
    )
