"""Reduce one number per token to one loss: the four aggregations and their denominators.

| aggregation    | sum                              | denominator                 |
|----------------|----------------------------------|-----------------------------|
| `token`        | all tokens                       | tokens                      |
| `sequence`     | each sequence's mean over tokens | non-empty sequences         |
| `sequence_sum` | each sequence's sum over tokens  | non-empty sequences         |
| `constant`     | all tokens                       | sequences · maximum length  |

The denominator belongs to the whole global minibatch: it is the sum of `denominator_of` over every
micro-batch and every rank. Then the losses of the micro-batches add up to the loss of the minibatch, and so
do their gradients. If a wrapper averages gradients over W ranks instead of adding them, pass the
denominator divided by W.
"""

from typing import Literal, TypeAlias, get_args

from torch import Tensor

from vantage.algorithms.masking import check_response_mask, keep

Aggregation: TypeAlias = Literal["token", "sequence", "sequence_sum", "constant"]
Denominator: TypeAlias = float | Tensor


def denominator_of(response_mask: Tensor, *, aggregation: Aggregation, max_length: int | None = None) -> int:
    """Return the contribution of this mask (B,T) to the denominator of its minibatch; 0 for an empty mask.

    `constant` counts `max_length` tokens for each of the B rows (Dr. GRPO, arXiv 2503.20783), where
    `max_length` is the longest response that sampling allows. T cannot replace it, since T is only the longest
    response in this batch. The other aggregations ignore it.

    Raises ValueError for `constant` without a `max_length`, or with one below a response's length.
    """
    check_response_mask(response_mask)
    _check_aggregation(aggregation)
    if aggregation == "token":
        return int(response_mask.sum())
    if aggregation in ("sequence", "sequence_sum"):
        return int(response_mask.any(dim=1).sum())
    if max_length is None:
        raise ValueError(
            "aggregation='constant' divides by sequences · maximum length, which a mask cannot tell: "
            "pass max_length, the longest response that sampling allows"
        )
    longest = int(response_mask.sum(dim=1).max()) if response_mask.numel() else 0
    if max_length < max(longest, 1):
        raise ValueError(
            f"max_length={max_length} must be ≥ 1 and no less than the longest response, {longest} tokens"
        )
    return response_mask.shape[0] * max_length


def aggregate(
    per_token: Tensor, response_mask: Tensor, *, aggregation: Aggregation, denominator: Denominator | None
) -> Tensor:
    """Return the sum of `per_token` (B,T) over the mask by `aggregation`, divided by `denominator`: a 0-d tensor.

    With an explicit denominator an empty mask gives 0, and a gradient of 0. None means that this call has
    the whole minibatch.

    Raises ValueError for a denominator that is not positive, and, when it is None, for an empty mask and for
    `constant`, which needs an explicit denominator because of its maximum length.
    """
    check_response_mask(response_mask, per_token=per_token)
    _check_aggregation(aggregation)
    if denominator is None:
        denominator = _whole_minibatch_denominator(response_mask, aggregation=aggregation)
    check_denominator(denominator)
    kept = keep(per_token, response_mask)
    if aggregation == "sequence":
        lengths = response_mask.sum(dim=1)
        return (kept.sum(dim=1) / lengths.clamp(min=1)).sum() / denominator
    return kept.sum() / denominator


def _whole_minibatch_denominator(response_mask: Tensor, *, aggregation: Aggregation) -> int:
    """Return the denominator for a call with the whole minibatch; raises ValueError if there is none."""
    if aggregation == "constant":
        raise ValueError(
            "aggregation='constant' needs an explicit denominator: "
            "denominator_of(response_mask, aggregation='constant', max_length=...) summed over the minibatch"
        )
    denominator = denominator_of(response_mask, aggregation=aggregation)
    if denominator == 0:
        raise ValueError(
            "response_mask has no True element, so the mean over this minibatch is undefined; "
            "for a micro-batch, pass the denominator of its whole minibatch"
        )
    return denominator


def check_denominator(denominator: Denominator) -> None:
    """Raise ValueError unless the denominator is positive (NaN is not)."""
    if not denominator > 0:
        raise ValueError(
            f"denominator={float(denominator)} is not positive; it counts the tokens or sequences "
            "of the whole global minibatch"
        )


def _check_aggregation(aggregation: str) -> None:
    """Raise ValueError unless the name is one of the four."""
    if aggregation not in get_args(Aggregation):
        known = ", ".join(get_args(Aggregation))
        raise ValueError(f"aggregation={aggregation!r} is unknown; use one of {known}")
