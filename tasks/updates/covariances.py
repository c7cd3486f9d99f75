"""Select tokens of a minibatch by the covariance of log-probability and advantage, with one more forward pass over it.

The means and the number of selected tokens are those of the whole minibatch. Every rank gathers the log-probabilities of all
rows, and selects the same tokens from them; a draw is a function of the seed and the step.
"""

from dataclasses import replace

import torch

from vantage.algorithms.covariance import token_covariances, tokens_to_clip, tokens_to_hold
from vantage.algorithms.masking import keep
from vantage.algorithms.policy_loss import log_range, where_clip_binds
from vantage.schemas.recipe.stages import PolicyOptimization
from vantage.tasks.rollout.rollouts import rollout_logprobs
from vantage.tasks.training.seeds import generator
from vantage.tasks.updates.actor_critic import ActorCritic
from vantage.tasks.updates.estimates import own_advantages
from vantage.tasks.updates.policy_losses import Minibatch


@torch.no_grad()
def with_selected_tokens(
    networks: ActorCritic, minibatch: Minibatch, work: PolicyOptimization, *, seed: int, step: int
) -> Minibatch:
    """Return the minibatch with the tokens that ``covariance`` selects under the present policy; unchanged without that switch.

    Args:
        seed: seed of the stage.
        step: number of the optimiser step, which determines the draw.
    """
    switches = work.algorithm
    if switches.covariance == "none":
        return minibatch
    # In the rollout's order, so that a draw does not depend on that of the minibatch, which is sorted by length
    rows, places = minibatch.rows.sort()
    estimates = minibatch.estimates
    sequences = minibatch.rollout.sequences.select(rows)
    width = sequences.response_ids.shape[1]
    mask = estimates.policy_mask[rows, :width]
    # Weights of another sampler belong to the loss, not to the covariance
    advantages = keep(own_advantages(estimates, rows, switches)[:, :width], mask)
    logprobs = rollout_logprobs(networks.policy, sequences, networks.models).logprobs
    covariances = token_covariances(logprobs, advantages, mask)
    if switches.covariance == "kl":
        selected = tokens_to_hold(covariances, mask, share=switches.covariance_share)
    else:
        lowest, highest = log_range(switches.clip_range_low, switches.clip_range_high)
        old_logprobs = minibatch.rollout.logprobs[rows, :width]
        log_ratio = keep(logprobs - old_logprobs, mask)
        selected = tokens_to_clip(
            covariances,
            mask,
            where_clip_binds(log_ratio, advantages, lowest=lowest, highest=highest),
            low=switches.covariance_low,
            high=switches.covariance_high,
            share=switches.covariance_share,
            generator=generator(seed, "covariance", step),
        )
    return replace(minibatch, selected=selected[places.argsort()])
