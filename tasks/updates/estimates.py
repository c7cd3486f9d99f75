"""Compute a rollout's advantages for the policy, and targets for the critic."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vantage.algorithms.advantages import (
    above_mean_return,
    blended_values,
    each_group_normalised,
    gae,
    greedy_baseline,
    group_mean_baseline,
    group_normalised,
    leave_one_out,
    length_adaptive_lambda,
    mean_return,
    monte_carlo_returns,
    over_tokens,
    returns_to_go,
    truncated_gae,
    whiten,
    whiten_by_sample,
)
from vantage.algorithms.critic_heads import agreement_weights
from vantage.algorithms.diagnostics import blended_weight, explained_variance, switched_weight
from vantage.algorithms.rewards import shape_rewards
from vantage.schemas.recipe.algorithm import COLLECTED, GROUPED, Algorithm
from vantage.tasks.rewards.scoring import Scores
from vantage.tasks.rewards.verifier_file import VerifierFunction
from vantage.tasks.rewards.verifier_scores import judged
from vantage.tasks.rollout.rollouts import Rollout, sequence_sums
from vantage.tasks.updates.critic_losses import shards_of

_AGAINST_THE_GROUP = {
    "leave_one_out": leave_one_out,
    "group_mean": group_mean_baseline,
    "group_normalised": group_normalised,
}


@dataclass(frozen=True)
class Estimates:
    """Tensors that are fixed before the first update of a rollout."""

    advantages: Tensor
    """(B,T)."""
    policy_mask: Tensor
    """(B,T): the tokens from which the policy learns."""
    is_positive: Tensor
    """(B,): the positive responses, which the positive-example loss imitates."""
    old_values: Tensor | None = None
    """(B,T): values of the critic, if there is one."""
    targets: Tensor | None = None
    """(B,T): targets of the critic's regression."""
    explained_variance: float | None = None
    """Explained variance of the critic on this rollout."""
    critic_weight: float = 1.0
    """Weight of the critic in the advantages: 1 full, 0 none (return less mean return)."""
    disagreement: Tensor | None = None
    """(B,T): standard deviation over the values of the critic, if it is an ensemble."""
    advantage_weights: Tensor | None = None
    """(B,T): weights of the normalised advantages by ``disagreement``, if the switches ask for them."""
    shards: Tensor | None = None
    """(B,): the number of the ensemble's head that learns from each response."""


def estimate(
    rollout: Rollout,
    algorithm: Algorithm,
    *,
    old_values: Tensor | None = None,
    final_values: Tensor | None = None,
    greedy_scores: Tensor | None = None,
    prompt_baselines: Tensor | None = None,
    critic_was_used: bool = True,
    weight: float | None = None,
    disagreement: Tensor | None = None,
    positive_verifier: VerifierFunction | None = None,
) -> Estimates:
    """Return everything from which the updates of one rollout learn.

    Args:
        old_values: (B,T), values of the critic; for ``advantage: gae``.
        final_values: (B,), values of the whole responses; for ``bootstrap_truncated``, which uses those of cut-off
            responses.
        greedy_scores: (B,), scaled scores of the greedy responses to the same prompts; for ``greedy_baseline``.
        prompt_baselines: (B,), baselines of the prompts, in units of the scaled scores; for ``reference_mean``,
            ``optimal_value`` and ``tracked_mean``.
        critic_was_used: whether the previous rollout used the critic; for ``critic_ev_hysteresis``.
        weight: weight of the critic in the advantages; None: from the explained variance of these values.
        disagreement: (B,T), standard deviation over the values of an ensemble.
        positive_verifier: the algorithm's verifier, if it names one.
    """
    mask = rollout.sequences.response_mask
    policy_mask = mask & rollout.sampled.ended[:, None] if algorithm.overlong_filter else mask
    if rollout.importance is not None:
        policy_mask = policy_mask & rollout.importance.kept
    ends = _ends(rollout, algorithm, final_values)
    explained = None if old_values is None else _explained_variance(rollout, algorithm, old_values)
    if weight is None:
        weight = critic_weight(explained, algorithm, was_used=critic_was_used)
    advantages = _advantages(
        rollout,
        algorithm,
        old_values,
        ends,
        weight,
        greedy_scores=greedy_scores,
        prompt_baselines=prompt_baselines,
    )
    if algorithm.normalise_each_score and policy_mask.any():
        advantages = whiten_by_sample(advantages, policy_mask)
    if algorithm.whiten_advantages:
        # Mean and deviation are over the tokens of the loss
        advantages = _whitened(advantages, policy_mask)
    targets = None
    if old_values is not None:
        # Decoupled GAE: a separate λ for the critic, from the same values
        targets = old_values + _gae(rollout, algorithm, old_values, ends, lam=algorithm.lambda_value)
    return Estimates(
        advantages=advantages,
        policy_mask=policy_mask,
        is_positive=positive_responses(rollout, algorithm, positive_verifier),
        old_values=old_values,
        targets=targets,
        explained_variance=explained,
        critic_weight=weight,
        disagreement=disagreement,
        advantage_weights=_weights_by_disagreement(disagreement, mask, algorithm),
        shards=shards_of(rollout.sampled.prompts, algorithm.critic_head, mask.device),
    )


def _weights_by_disagreement(
    disagreement: Tensor | None, response_mask: Tensor, algorithm: Algorithm
) -> Tensor | None:
    """Return the weights (B,T) of the advantages; None if the switches ask for none."""
    if algorithm.mask_agreed_share is None:
        return None
    assert disagreement is not None
    return agreement_weights(disagreement, response_mask, share=algorithm.mask_agreed_share)


def critic_weight(explained: float | None, algorithm: Algorithm, *, was_used: bool) -> float:
    """Return the critic's weight in this rollout's advantages, from its explained variance; 1 unless the switches ask for
    it."""
    if explained is None:
        return 1.0
    if algorithm.critic_ev_threshold is not None:
        return switched_weight(
            explained,
            threshold=algorithm.critic_ev_threshold,
            hysteresis=algorithm.critic_ev_hysteresis or 0.0,
            was_used=was_used,
        )
    return blended_weight(explained) if algorithm.critic_blend else 1.0


def _explained_variance(rollout: Rollout, algorithm: Algorithm, values: Tensor) -> float:
    """Return the explained variance of Monte-Carlo returns, over all valid tokens at once."""
    mask = rollout.sequences.response_mask
    returns = monte_carlo_returns(rollout.rewards, mask, gamma=algorithm.gamma)
    return explained_variance(values, returns, mask)


def _ends(rollout: Rollout, algorithm: Algorithm, final_values: Tensor | None) -> Tensor | None:
    """Return the value after the last token (B,): the critic's value for a cut-off response, 0 for a response that
    ended."""
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
    weight: float,
    *,
    greedy_scores: Tensor | None,
    prompt_baselines: Tensor | None,
) -> Tensor:
    mask, gamma = rollout.sequences.response_mask, algorithm.gamma
    if algorithm.advantage == "gae":
        assert old_values is not None
        if weight == 0:
            return above_mean_return(rollout.rewards, mask, gamma=gamma)
        if weight < 1:
            mean = mean_return(monte_carlo_returns(rollout.rewards, mask, gamma=gamma), mask)
            old_values = blended_values(old_values, mean, weight=weight)
            # A finished response has 0 after its end, which is not a value of the critic
            blended = None if ends is None else blended_values(ends, mean, weight=weight)
            ends = blended if blended is None else blended.masked_fill(rollout.sampled.ended, 0.0)
        lam: float | Tensor = algorithm.lambda_policy
        if algorithm.length_adaptive_alpha is not None:
            lam = length_adaptive_lambda(rollout.sequences.lengths, alpha=algorithm.length_adaptive_alpha)
        return _gae(rollout, algorithm, old_values, ends, lam=lam)
    if algorithm.advantage in GROUPED and algorithm.kl_credit == "token":
        above = _above_others(rollout.scaled_scores, algorithm, prompt_baselines)
        rewards = shape_rewards(above, rollout.kl, mask, kl_coef=rollout.kl_coef)
        return returns_to_go(rewards, mask, gamma=1.0)
    if algorithm.advantage in (*GROUPED, *COLLECTED):
        if algorithm.normalise_each_score:
            return over_tokens(_above_others_each(rollout.scores, algorithm), mask)
        of_responses = sequence_sums(rollout.rewards, mask)
        return over_tokens(_above_others(of_responses, algorithm, prompt_baselines), mask)
    rewards = rollout.rewards
    if algorithm.advantage == "greedy_baseline":
        assert greedy_scores is not None
        above = greedy_baseline(rollout.scaled_scores, greedy_scores)
        rewards = shape_rewards(above, rollout.kl, mask, kl_coef=rollout.kl_coef)
    return returns_to_go(rewards, mask, gamma=gamma)


def _above_others(scores: Tensor, algorithm: Algorithm, prompt_baselines: Tensor | None) -> Tensor:
    """Return whole responses' scores less KL (B,), less the scores of other responses to the prompt, old or new."""
    if algorithm.advantage in GROUPED:
        groups = torch.arange(len(scores), device=scores.device) // algorithm.samples_per_prompt
        return _AGAINST_THE_GROUP[algorithm.advantage](scores, groups)
    assert prompt_baselines is not None
    return (scores.double() - prompt_baselines).to(scores.dtype)


def _above_others_each(scores: Scores, algorithm: Algorithm) -> Tensor:
    """Return the weighted sum (B,) of the scores, each normalised within its group (GDPO)."""
    counted = torch.stack([each.scores for each in scores.summands], dim=1)
    weights = torch.tensor([each.weight for each in scores.summands], dtype=torch.float64)
    groups = torch.arange(len(counted), device=counted.device) // algorithm.samples_per_prompt
    return each_group_normalised(counted, weights.to(counted.device), groups)


def own_advantages(estimates: Estimates, rows: Tensor, algorithm: Algorithm) -> Tensor:
    """Return the advantages (b,T) of the minibatch of these rows as in its loss, before any weights for another
    sampler."""
    advantages = minibatch_advantages(estimates.advantages[rows], estimates.policy_mask[rows], algorithm)
    if estimates.advantage_weights is None:
        return advantages
    return advantages * estimates.advantage_weights[rows]


def minibatch_advantages(advantages: Tensor, policy_mask: Tensor, algorithm: Algorithm) -> Tensor:
    """Return the advantages (b,T) of one whole minibatch, normalised and clipped by the switches."""
    if algorithm.normalise_advantages:
        advantages = _whitened(advantages, policy_mask)
    if algorithm.advantage_clip is not None:
        advantages = advantages.clamp(-algorithm.advantage_clip, algorithm.advantage_clip)
    return advantages


def _whitened(advantages: Tensor, policy_mask: Tensor) -> Tensor:
    """Return the advantages whitened over the masked tokens; unchanged if there are none."""
    return whiten(advantages, policy_mask) if policy_mask.any() else advantages


def positive_responses(
    rollout: Rollout, algorithm: Algorithm, verifier: VerifierFunction | None = None
) -> Tensor:
    """Return which responses (B,) the positive-example loss imitates: by a verifier, or by a score threshold."""
    scores = rollout.scores.total
    if not algorithm.positive_nll_coef:
        return torch.zeros_like(scores, dtype=torch.bool)
    if algorithm.positive_verifier is not None:
        assert verifier is not None
        sampled = rollout.sampled
        right = judged(verifier, sampled.prompts, sampled.responses, sampled.answers)
        return right.to(scores.device)
    # a recipe without a threshold was refused when it was loaded
    assert algorithm.positive_threshold is not None
    return scores > algorithm.positive_threshold
