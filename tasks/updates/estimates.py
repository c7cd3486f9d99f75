"""What a rollout's updates learn from: advantages for the policy, targets for the critic."""

from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.advantages import (
    gae,
    greedy_baseline,
    group_mean_baseline,
    group_normalised,
    leave_one_out,
    length_adaptive_lambda,
    over_tokens,
    returns_to_go,
    truncated_gae,
    whiten,
)
from algorithms.rewards import shape_rewards
from schemas.recipe.algorithm import GROUPED, Algorithm
from tasks.rewards.verifier_file import VerifierFunction
from tasks.rewards.verifier_scores import judged
from tasks.rollout.rollouts import Rollout, sequence_sums

_AGAINST_THE_GROUP = {
    "leave_one_out": leave_one_out,
    "group_mean": group_mean_baseline,
    "group_normalised": group_normalised,
}


@dataclass(frozen=True)
class Estimates:
    """What is fixed before the first update of a rollout."""

    advantages: Tensor
    """(B,T)."""
    policy_mask: Tensor
    """(B,T): the tokens that the policy learns from."""
    is_positive: Tensor
    """(B,): the positive responses, which the positive-example loss imitates."""
    old_values: Tensor | None = None
    """(B,T): the critic's, where there is one."""
    targets: Tensor | None = None
    """(B,T): of the critic's regression."""


def estimate(
    rollout: Rollout,
    algorithm: Algorithm,
    *,
    old_values: Tensor | None = None,
    final_values: Tensor | None = None,
    greedy_scores: Tensor | None = None,
    positive_verifier: VerifierFunction | None = None,
) -> Estimates:
    """Everything that the updates of one rollout learn from.

    Args:
        old_values: (B,T), of the critic; for ``advantage: gae``.
        final_values: (B,), its values of the whole responses; for ``bootstrap_truncated``, which counts those of
            the responses that were cut off.
        greedy_scores: (B,), scaled scores of the greedy responses to the same prompts; for ``greedy_baseline``.
        positive_verifier: the algorithm's, loaded, where it names one.
    """
    mask = rollout.sequences.response_mask
    policy_mask = mask & rollout.sampled.ended[:, None] if algorithm.overlong_filter else mask
    ends = _ends(rollout, algorithm, final_values)
    advantages = _advantages(rollout, algorithm, old_values, ends, greedy_scores)
    if algorithm.whiten_advantages:
        # the mean and deviation are over the tokens that the loss is over
        advantages = _whitened(advantages, policy_mask)
    targets = None
    if old_values is not None:
        # decoupled GAE: a λ of its own for the critic, from the same values
        targets = old_values + _gae(rollout, algorithm, old_values, ends, lam=algorithm.lambda_value)
    return Estimates(
        advantages=advantages,
        policy_mask=policy_mask,
        is_positive=positive_responses(rollout, algorithm, positive_verifier),
        old_values=old_values,
        targets=targets,
    )


def _ends(rollout: Rollout, algorithm: Algorithm, final_values: Tensor | None) -> Tensor | None:
    """The value after the last token (B,): the critic's of a response that was cut off, 0 of one that ended."""
    if not algorithm.bootstrap_truncated:
        return None
    assert final_values is not None
    return final_values.masked_fill(rollout.sampled.ended, 0.0)


def _gae(
    rollout: Rollout, algorithm: Algorithm, values: Tensor, ends: Tensor | None, *, lam: float | Tensor
) -> Tensor:
    mask, gamma = rollout.sequences.response_mask, algorithm.gamma
    if algorithm.gae_horizon is None:
        return gae(rollout.rewards, values, mask, gamma=gamma, lam=lam, final_values=ends)
    return truncated_gae(
        rollout.rewards, values, mask, gamma=gamma, lam=lam, horizon=algorithm.gae_horizon, final_values=ends
    )


def _advantages(
    rollout: Rollout,
    algorithm: Algorithm,
    old_values: Tensor | None,
    ends: Tensor | None,
    greedy_scores: Tensor | None,
) -> Tensor:
    mask, gamma = rollout.sequences.response_mask, algorithm.gamma
    if algorithm.advantage == "gae":
        assert old_values is not None
        lam: float | Tensor = algorithm.lambda_policy
        if algorithm.length_adaptive_alpha is not None:
            lam = length_adaptive_lambda(rollout.sequences.lengths, alpha=algorithm.length_adaptive_alpha)
        return _gae(rollout, algorithm, old_values, ends, lam=lam)
    if algorithm.advantage in GROUPED:
        of_responses = sequence_sums(rollout.rewards, mask)
        groups = torch.arange(len(of_responses), device=mask.device) // algorithm.samples_per_prompt
        return over_tokens(_AGAINST_THE_GROUP[algorithm.advantage](of_responses, groups), mask)
    rewards = rollout.rewards
    if algorithm.advantage == "greedy_baseline":
        assert greedy_scores is not None
        above = greedy_baseline(rollout.scaled_scores, greedy_scores)
        rewards = shape_rewards(above, rollout.kl, mask, kl_coef=rollout.kl_coef)
    return returns_to_go(rewards, mask, gamma=gamma)


def minibatch_advantages(advantages: Tensor, policy_mask: Tensor, algorithm: Algorithm) -> Tensor:
    """The advantages (b,T) of one whole minibatch, normalised and clipped as the switches say."""
    if algorithm.normalise_advantages:
        advantages = _whitened(advantages, policy_mask)
    if algorithm.advantage_clip is not None:
        advantages = advantages.clamp(-algorithm.advantage_clip, algorithm.advantage_clip)
    return advantages


def _whitened(advantages: Tensor, policy_mask: Tensor) -> Tensor:
    """Whitened over the masked tokens; as they are where there is none."""
    return whiten(advantages, policy_mask) if policy_mask.any() else advantages


def positive_responses(
    rollout: Rollout, algorithm: Algorithm, verifier: VerifierFunction | None = None
) -> Tensor:
    """Which responses (B,) the positive-example loss imitates: by a verifier, or by a score threshold."""
    scores = rollout.scores.total
    if not algorithm.positive_nll_coef:
        return torch.zeros_like(scores, dtype=torch.bool)
    if algorithm.positive_verifier is not None:
        assert verifier is not None
        sampled = rollout.sampled
        right = judged(verifier, sampled.prompts, sampled.responses, sampled.answers)
        return right.to(scores.device)
    assert algorithm.positive_threshold is not None  # or the recipe would have been refused
    return scores > algorithm.positive_threshold
