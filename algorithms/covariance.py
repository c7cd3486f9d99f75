"""Select the few tokens that lower the entropy most, by the covariance of log-probability and advantage.

arXiv 2505.22617: the policy's entropy falls with the covariance of a token's log-probability and its advantage, and few
tokens have most of it. Means and counts are those of the whole global minibatch, so these functions see all of its rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vantage.algorithms.aggregation import Aggregation, Denominator, aggregate
from vantage.algorithms.kl import distance
from vantage.algorithms.masking import check_response_mask, keep
from vantage.algorithms.metrics import SumCount, sum_count


@dataclass(frozen=True)
class SelectedTokens:
    """`covariance_fraction`: share of the valid tokens that were selected."""

    covariance_fraction: SumCount


@dataclass(frozen=True)
class SelectedKLLoss:
    """`loss` is 0-d and differentiable; `covariance_kl` is |log ρ| over the selected tokens, in nats."""

    loss: Tensor
    covariance_kl: SumCount


def token_covariances(logprobs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """Return (logprobs − their mean)·(advantages − their mean) at each token (B,T), in float64 and 0 outside the mask.

    The means are over the mask. All tensors (B,T), log-probabilities in nats; no gradient flows.

    Raises ValueError for unequal shapes, TypeError for a mask that is not boolean.
    """
    check_response_mask(response_mask, logprobs=logprobs, advantages=advantages)
    count = response_mask.sum().clamp(min=1)
    factors = []
    for given in (logprobs, advantages):
        kept = keep(given.detach().double(), response_mask)
        factors.append(kept - kept.sum() / count)
    return keep(factors[0] * factors[1], response_mask)


def tokens_to_clip(
    covariances: Tensor,
    response_mask: Tensor,
    is_clipped: Tensor,
    *,
    low: float,
    high: float,
    share: float,
    generator: torch.Generator,
) -> Tensor:
    """Return which tokens (B,T) clip-cov removes from the gradient.

    They are drawn from the tokens outside `is_clipped` (B,T) with a covariance between `low` and `high`. Their number
    is `share` of the mask's tokens, rounded down, but at least one. `generator` is on the CPU, so every rank draws the
    same.

    Raises ValueError for unequal shapes, and for a share that is not between 0 and 1.
    """
    check_response_mask(response_mask, covariances=covariances, is_clipped=is_clipped)
    _check_share(share)
    places = (response_mask & ~is_clipped & (covariances > low) & (covariances < high)).flatten().nonzero()
    order = torch.randperm(len(places), generator=generator)[: _count(response_mask, share)]
    return _at(places[order.to(places.device)], response_mask)


def tokens_to_hold(covariances: Tensor, response_mask: Tensor, *, share: float) -> Tensor:
    """Return which tokens (B,T) kl-cov holds by a KL penalty: those of the largest covariance.

    Their number is `share` of the mask's tokens, rounded down, but at least one; of equal ones the first in order of
    rows.

    Raises ValueError for unequal shapes, and for a share that is not between 0 and 1.
    """
    check_response_mask(response_mask, covariances=covariances)
    _check_share(share)
    places = response_mask.flatten().nonzero()
    order = covariances.flatten()[places[:, 0]].argsort(descending=True, stable=True)
    return _at(places[order[: _count(response_mask, share)]], response_mask)


def selected_tokens(selected: Tensor, response_mask: Tensor) -> SelectedTokens:
    """Return the metric of a selection (B,T)."""
    return SelectedTokens(sum_count(selected.float(), response_mask))


def selected_kl_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    response_mask: Tensor,
    selected: Tensor,
    *,
    aggregation: Aggregation,
    denominator: Denominator | None = None,
) -> SelectedKLLoss:
    """Return the loss |logprobs − old_logprobs| of the selected tokens, and 0 of the others: kl-cov.

    The authors' code estimates the KL to the old policy in this way. At a rollout's first update both are equal up to
    rounding, and the gradient is 0 (`vantage.algorithms.kl.distance`). All tensors (B,T), log-probabilities in nats;
    the gradient flows
    through `logprobs` only. `aggregation` and `denominator` are those of `vantage.algorithms.aggregation.aggregate`, so the
    other tokens count in the denominator.

    Raises ValueError for unequal shapes, and as `aggregate`.
    """
    check_response_mask(response_mask, logprobs=logprobs, old_logprobs=old_logprobs, selected=selected)
    held = response_mask & selected
    per_token = distance(keep(logprobs, held) - keep(old_logprobs.detach(), held))
    return SelectedKLLoss(
        loss=aggregate(per_token, response_mask, aggregation=aggregation, denominator=denominator),
        covariance_kl=sum_count(per_token, held),
    )


def _count(response_mask: Tensor, share: float) -> int:
    return max(int(share * int(response_mask.sum())), 1)


def _at(places: Tensor, response_mask: Tensor) -> Tensor:
    """Return a tensor in the mask's shape that is True at these places (N,1) of the flattened mask."""
    selected = torch.zeros_like(response_mask).flatten()
    selected[places[:, 0]] = True
    return selected.view_as(response_mask)


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"share={share} is not above 0 and at most 1; the paper uses 2e-4 and 2e-3")
