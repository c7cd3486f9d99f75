"""Weights for tokens that were sampled by another policy than the one that learns from them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from torch import Tensor

from vantage.algorithms.masking import check_response_mask, keep
from vantage.algorithms.metrics import SumCount, sum_count

Correction: TypeAlias = Literal["truncate", "mask"]
RatioOf: TypeAlias = Literal["token", "sequence", "sequence_mean"]


@dataclass(frozen=True)
class ImportanceWeights:
    """`weights` (B,T), 0 outside `kept`; `kept` (B,T), the tokens of the loss. The metrics are over valid tokens.

    `importance_weight`: weight of each kept token, after the bounds. `importance_capped`: 1 where a bound binds.
    `effective_share`: (Σw)²/(n·Σw²) of the n ratios w before the bounds, of tokens or of responses; NaN if there are
    none.
    """

    weights: Tensor
    kept: Tensor
    importance_weight: SumCount
    importance_capped: SumCount
    effective_share: float


def importance_weights(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    response_mask: Tensor,
    *,
    correction: Correction,
    ratio_of: RatioOf = "token",
    low: float | None = None,
    high: float | None = None,
) -> ImportanceWeights:
    """Return the ratio w = π/π_sampler of each token, held within bounds; constants, through which no gradient flows.

    `truncate` is min(max(w, low), high): truncated importance sampling (Ionides 2008). `mask` is w where low ≤ w ≤
    high; the other tokens are left out of the loss, and are not in `kept` (IcePop, arXiv 2510.18855: 0.5 and 2).
    `ratio_of`: `token` is each
    token's own ratio; `sequence` that of its response, the product over tokens; `sequence_mean` the geometric mean of
    these. All tensors (B,T), log-probabilities in nats; a bound of None sets no limit.

    Raises ValueError for a bound that is not above 0, a `low` above `high`, an unknown name, and unequal shapes.
    """
    check_response_mask(response_mask, logprobs=logprobs, sampler_logprobs=sampler_logprobs)
    _check(correction, ratio_of, low, high)
    log_ratio = _LOG_RATIOS[ratio_of](
        keep(logprobs.detach(), response_mask) - keep(sampler_logprobs.detach(), response_mask), response_mask
    )
    lowest = -math.inf if low is None else math.log(low)
    highest = math.inf if high is None else math.log(high)
    is_out = response_mask & ((log_ratio < lowest) | (log_ratio > highest))
    kept = response_mask & ~is_out if correction == "mask" else response_mask
    # The logarithm is bounded before the exponential, since an overflowing ratio times 0 would be NaN
    weights = log_ratio.clamp(min=lowest, max=highest).exp() * kept
    return ImportanceWeights(
        weights,
        kept,
        importance_weight=sum_count(weights, kept),
        importance_capped=sum_count(is_out.float(), response_mask),
        effective_share=effective_share(
            log_ratio[response_mask] if ratio_of == "token" else log_ratio[response_mask.any(dim=1), 0]
        ),
    )


def effective_share(log_weights: Tensor) -> float:
    """Return (Σw)²/(n·Σw²) of n weights with these logarithms (n,): 1 if they are equal, 1/n if one has all the weight;
    NaN if n = 0."""
    if not len(log_weights):
        return math.nan
    logs = log_weights.double()
    log_share = 2 * logs.logsumexp(dim=0) - (2 * logs).logsumexp(dim=0) - math.log(len(logs))
    return log_share.exp().item()


def _of_token(log_ratio: Tensor, _: Tensor) -> Tensor:
    return log_ratio


def _of_sequence(log_ratio: Tensor, _: Tensor) -> Tensor:
    return log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)


def sequence_mean(log_ratio: Tensor, response_mask: Tensor) -> Tensor:
    """Return at each token (B,T) the mean over its response of these logarithms (B,T), which are 0 outside the mask."""
    lengths = response_mask.sum(dim=1, keepdim=True).clamp(min=1)
    return (log_ratio.sum(dim=1, keepdim=True) / lengths).expand_as(log_ratio)


_LOG_RATIOS: dict[RatioOf, Callable[[Tensor, Tensor], Tensor]] = {
    "token": _of_token,
    "sequence": _of_sequence,
    "sequence_mean": sequence_mean,
}


def _check(correction: str, ratio_of: str, low: float | None, high: float | None) -> None:
    for name, value, known in (
        ("correction", correction, get_args(Correction)),
        ("ratio_of", ratio_of, get_args(RatioOf)),
    ):
        if value not in known:
            raise ValueError(f"{name}={value!r} is not one of {', '.join(known)}")
    for name, bound in (("low", low), ("high", high)):
        if bound is not None and not bound > 0:
            raise ValueError(f"{name}={bound} is not above 0")
    if low is not None and high is not None and low > high:
        raise ValueError(f"low={low} is above high={high}")
