"""Losses, disagreement and calibration of critics that predict several values at a position.

Shapes: `B` responses, `T` response tokens, `N` quantiles, `K` values of an ensemble. Critics predict (B,T,N) or (B,T,K); the
value is the mean over the last dimension.
"""

import torch
from torch import Tensor

from vantage.algorithms.aggregation import Denominator, aggregate
from vantage.algorithms.masking import check_response_mask, keep

BOUNDS = 9
"""Most bounds at which the distribution of quantiles is compared with the distribution of returns."""


def quantile_levels(count: int, *, device: torch.device | None = None) -> Tensor:
    """Return the levels (i + ½)/N (N,) of N quantiles (QR-DQN, arXiv 1710.10044 lemma 2)."""
    return (torch.arange(count, dtype=torch.float32, device=device) + 0.5) / count


def quantile_huber_loss(
    quantiles: Tensor,
    targets: Tensor,
    response_mask: Tensor,
    *,
    huber: float,
    denominator: Denominator | None = None,
) -> Tensor:
    """Return the mean over tokens and quantiles of the quantile Huber loss, 0-d and differentiable.

    ρ_τ(u) = |τ − 1{u < 0}| · L(u)/κ with u = target − quantile, L(u) = ½u² for |u| ≤ κ, else κ·(|u| − ½κ) (QR-DQN, arXiv
    1710.10044 eq. 9-10). At κ = 0 it is |τ − 1{u < 0}| · |u|. QR-DQN sums over the quantiles; with the mean, the
    gradient's size does not depend on N.

    `quantiles` (B,T,N); `targets`, `response_mask` (B,T). The gradient flows through `quantiles` only. `denominator` is the
    number of valid tokens of the whole global minibatch; None takes that of this call.

    Raises ValueError for a negative κ, unequal shapes, and for an empty mask when the denominator is None.
    """
    if huber < 0:
        raise ValueError(f"huber={huber} is negative; use 0 for the absolute error")
    check_response_mask(response_mask, targets=targets, quantiles=quantiles[..., 0])
    kept = keep(quantiles, response_mask[..., None])
    error = keep(targets.detach(), response_mask)[..., None] - kept
    weight = (quantile_levels(kept.shape[-1], device=kept.device) - (error < 0).to(kept.dtype)).abs()
    size = error.abs()
    if huber > 0:
        size = torch.where(size <= huber, error.square() / (2 * huber), size - huber / 2)
    return aggregate(
        (weight * size).mean(dim=-1), response_mask, aggregation="token", denominator=denominator
    )


def own_values(values: Tensor, shards: Tensor) -> Tensor:
    """Select from the values (B,T,K) of an ensemble those (B,T) of the head that learns from each response.

    Each head learns from its own share of the prompts (AsyPPO, arXiv 2510.01656). `shards` (B,) are the numbers of the heads.
    """
    places = shards[:, None, None].expand(*values.shape[:2], 1)
    own: Tensor = values.gather(2, places)[..., 0]
    return own


def disagreement_of_heads(values: Tensor) -> Tensor:
    """Return the population standard deviation (B,T) over the values (B,T,K) of an ensemble."""
    return values.std(dim=-1, correction=0)


def agreement_weights(disagreement: Tensor, response_mask: Tensor, *, share: float) -> Tensor:
    """Return weights (B,T) of the advantages: 0 on the tokens with the least disagreement, 1 elsewhere.

    Of n valid tokens, at most ⌊share · n⌋ get 0: those whose disagreement is less than the one after them in order.
    Tokens with equal disagreement get equal weights, so that equal heads change no advantage (AsyPPO, arXiv 2510.01656,
    masks advantages where critics agree; the rule for ties is ours).

    Raises ValueError for a share outside [0, 1), unequal shapes, or an empty mask.
    """
    if not 0 <= share < 1:
        raise ValueError(f"share={share} is not in [0, 1)")
    check_response_mask(response_mask, disagreement=disagreement)
    found = disagreement.detach()[response_mask]
    if not len(found):
        raise ValueError("response_mask has no True element; weights are about the tokens of a rollout")
    bound = found.sort().values[int(share * len(found))]
    return torch.where(response_mask & (disagreement < bound), 0.0, 1.0).to(disagreement.dtype)


def calibration_bounds(returns: Tensor, response_mask: Tensor) -> Tensor:
    """Return at most nine bounds (M,) near the deciles of the returns, each between two neighbouring different returns;
    in float64 on the CPU.

    So bounds never equal a return, even if returns have few values, such as 0 and 1. Empty if all returns are equal.
    `returns`, `response_mask` (B,T).

    Raises ValueError for unequal shapes or an empty mask.
    """
    check_response_mask(response_mask, returns=returns)
    found = returns.detach()[response_mask].cpu().double().sort().values
    if not len(found):
        raise ValueError("response_mask has no True element; a diagnosis needs the whole set of responses")
    distinct = found.unique()
    tenths = found[torch.arange(1, BOUNDS + 1) * len(found) // (BOUNDS + 1)]
    lower = torch.searchsorted(distinct, tenths).clamp(max=len(distinct) - 2).unique()
    bounds: Tensor = (distinct[lower] + distinct[lower + 1]) / 2 if len(distinct) > 1 else distinct[:0]
    return bounds


def shares_up_to(quantiles: Tensor, bounds: Tensor) -> Tensor:
    """Return the share (B,T,M) of the quantiles (B,T,N) of each token that are at most each bound (M,)."""
    limits = bounds.to(device=quantiles.device, dtype=quantiles.dtype)
    return torch.stack([(quantiles <= limit).float().mean(dim=-1) for limit in limits], dim=-1)


def quantile_calibration_error(
    shares: Tensor, returns: Tensor, response_mask: Tensor, bounds: Tensor
) -> float:
    """Return the distance of the predicted distribution of returns from the actual one, over all valid tokens at once.

    It is the mean over the bounds of |mean predicted share up to the bound − share of returns up to it|: marginal
    calibration (Gneiting, Balabdaoui, Raftery 2007, JRSS B 69). NaN without bounds. `shares` (B,T,M) from
    `shares_up_to`; `returns`, `response_mask`
    (B,T); `bounds` (M,) from `calibration_bounds`.

    Raises ValueError for unequal shapes.
    """
    check_response_mask(response_mask, returns=returns)
    if not len(bounds):
        return float("nan")
    found = returns.detach()[response_mask].cpu().double()
    predicted = shares.detach()[response_mask].cpu().double().mean(dim=0)
    observed = torch.stack([(found <= bound).double().mean() for bound in bounds])
    return (predicted - observed).abs().mean().item()
