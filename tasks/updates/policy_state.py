"""State of policy optimisation in its checkpoints beside the networks, and the rules by which the KL coefficients change."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from math import isfinite

from vantage.algorithms.entropy_control import EntropyController
from vantage.algorithms.kl import PenaltyController, ProportionalController
from vantage.algorithms.rewards import RunningMoments
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.resolved import ResolvedPolicyOptimization
from vantage.schemas.records.job import StageJob
from vantage.tasks.rollout.reward_moments import read_moments
from vantage.tasks.rollout.rollouts import Rollout, sequence_sums
from vantage.tasks.training.stage_state import ADDED_LATER, BestSoFar
from vantage.tasks.updates.actor_critic import critic_folder
from vantage.tasks.updates.policy_losses import Coefficients


@dataclass(frozen=True)
class PolicyState(BestSoFar):
    """State that is saved in the checkpoints beside the networks."""

    batches: int = 0
    """Number of batches of prompts that were sampled."""
    kl_coef: float = 0.0
    """β of the KL to the reference in the next rollout's rewards."""
    kl_penalty_coef: float = 0.0
    """β of the KL(old‖new) penalty in the next update."""
    moments: RunningMoments = field(default_factory=RunningMoments)
    """Moments of all scores so far."""
    critic_is_used: bool = field(default=True, metadata=ADDED_LATER)
    """Whether the last rollout's advantages used the critic."""
    critic_weight_sum: float = field(default=0.0, metadata=ADDED_LATER)
    """Sum of the critic's weight over the iterations."""


@dataclass(frozen=True)
class AdaptingPolicyState(PolicyState):
    """State of a stage whose entropy coefficient adapts; the state of other stages keeps its fields, and so its
    digest."""

    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus in the next update."""
    entropy_is_low: bool = True
    """Whether the entropy was below its target in the last update; only then the bonus counts."""


def coefficients(state: PolicyState, algorithm: Algorithm) -> Coefficients:
    """Return the coefficients of the next update's loss."""
    controller = entropy_controller(state, algorithm)
    return Coefficients(
        kl_penalty=state.kl_penalty_coef,
        entropy=algorithm.entropy_coef if controller is None else controller.applied,
    )


def entropy_controller(state: PolicyState, algorithm: Algorithm) -> EntropyController | None:
    """Return the controller of the entropy coefficient; None if it is fixed."""
    if algorithm.entropy_target is None:
        return None
    assert isinstance(state, AdaptingPolicyState)
    return EntropyController(
        state.entropy_coef,
        is_low=state.entropy_is_low,
        target=algorithm.entropy_target,
        step=algorithm.entropy_step,
        highest=algorithm.entropy_coef_max,
    )


def with_updated_entropy_coef(state: PolicyState, entropy: float | None, algorithm: Algorithm) -> PolicyState:
    """Return the state with the entropy coefficient for the next update, moved by the entropy (nats per token) in this one.

    The coefficient stays unchanged if the entropy is not finite, which a stage may tolerate, or if the update measured
    none.
    """
    controller = entropy_controller(state, algorithm)
    if controller is None or entropy is None or not isfinite(entropy):
        return state
    moved = controller.update(entropy)
    assert isinstance(state, AdaptingPolicyState)
    return replace(state, entropy_coef=moved.coef, entropy_is_low=moved.is_low)


def with_updated_kl_coefs(
    state: PolicyState, rollout: Rollout, measure_kl: Callable[[], float], algorithm: Algorithm
) -> PolicyState:
    """Return the state with the coefficients for the next rollout, changed by the policy's KL in this one."""
    return replace(
        state,
        kl_coef=updated_kl_coef(state.kl_coef, rollout, algorithm),
        kl_penalty_coef=updated_kl_penalty_coef(state.kl_penalty_coef, measure_kl, algorithm),
    )


def updated_kl_penalty_coef(coef: float, measure_kl: Callable[[], float], algorithm: Algorithm) -> float:
    """Return KLPEN's β for the next rollout; ``measure_kl`` returns KL(old‖new) in nats per token, and is called only if
    β adapts."""
    if algorithm.kl_penalty_target is None:
        return coef
    return PenaltyController(coef, target=algorithm.kl_penalty_target).update(measure_kl()).coef


def updated_kl_coef(kl_coef: float, rollout: Rollout, algorithm: Algorithm) -> float:
    """Return β for the next rollout: unchanged, or moved towards the target KL (nats per response)."""
    if algorithm.kl_target is None:
        return kl_coef
    controller = ProportionalController(kl_coef, target=algorithm.kl_target, horizon=algorithm.kl_horizon)
    per_response = sequence_sums(rollout.log_ratios, rollout.sequences.response_mask)
    return controller.update(per_response.mean().item(), num_sequences=len(per_response)).coef


def initial_state(job: StageJob[ResolvedPolicyOptimization]) -> PolicyState:
    """Return the state before the first iteration; running moments come from the stage that pretrained the critic."""
    algorithm = job.work.algorithm
    critic = critic_folder(job) if algorithm.reads_critic else None
    state = PolicyState(
        kl_coef=algorithm.kl_coef,
        kl_penalty_coef=algorithm.kl_penalty_coef,
        moments=read_moments(critic),
    )
    if algorithm.entropy_target is None:
        return state
    fixed = {each.name: getattr(state, each.name) for each in fields(state)}
    return AdaptingPolicyState(**fixed, entropy_coef=algorithm.entropy_coef)
