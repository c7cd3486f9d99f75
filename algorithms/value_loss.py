"""Loss of the critic: squared error against its targets."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vantage.algorithms.aggregation import Denominator, aggregate
from vantage.algorithms.masking import check_response_mask, keep
from vantage.algorithms.metrics import SumCount, sum_count


@dataclass(frozen=True)
class ValueLoss:
    """`loss` is 0-d and differentiable; the metrics are over valid tokens.

    `value_clip_fraction`: tokens on which the clip binds. `value_mse`: (V − target)², without the factor ½
    and the clip. `value_bias`: V − target.
    """

    loss: Tensor
    value_clip_fraction: SumCount
    value_mse: SumCount
    value_bias: SumCount


def value_loss(
    values: Tensor,
    old_values: Tensor | None,
    targets: Tensor,
    response_mask: Tensor,
    *,
    value_clip_range: float | None = None,
    denominator: Denominator | None = None,
) -> ValueLoss:
    """Return ½ · mean over tokens of (V − target)²; with a clip range c, ½ · mean of the larger of that and

        (clip(V, old_V − c, old_V + c) − target)²

    the form of OpenAI's baselines, PPO2. All tensors (B,T); the gradient flows through `values` only.
    `old_values` are those of the rollout and may be None without a clip range. `denominator` is the number of
    valid tokens of the whole global minibatch; None takes this call's.

    Raises ValueError for a clip range that is not positive or lacks `old_values`, for unequal shapes, for a
    denominator that is not positive, and for an empty mask when the denominator is None.
    """
    check_response_mask(response_mask, values=values, targets=targets)
    kept_values, kept_targets = keep(values, response_mask), keep(targets.detach(), response_mask)
    error = kept_values - kept_targets
    squared_error = error.square()
    clip_binds = torch.zeros_like(response_mask)
    if value_clip_range is not None:
        clipped = _clip_values(kept_values, old_values, response_mask, value_clip_range)
        clipped_squared_error = (clipped - kept_targets).square()
        clip_binds = clipped_squared_error > squared_error
        per_token = torch.maximum(squared_error, clipped_squared_error)
    else:
        per_token = squared_error
    return ValueLoss(
        loss=0.5 * aggregate(per_token, response_mask, aggregation="token", denominator=denominator),
        value_clip_fraction=sum_count(clip_binds, response_mask),
        value_mse=sum_count(squared_error, response_mask),
        value_bias=sum_count(error, response_mask),
    )


def _clip_values(
    values: Tensor, old_values: Tensor | None, response_mask: Tensor, value_clip_range: float
) -> Tensor:
    if not value_clip_range > 0:
        raise ValueError(f"value_clip_range={value_clip_range} is not positive; use None for no clip")
    if old_values is None:
        raise ValueError(f"value_clip_range={value_clip_range} clips around old_values, which is None")
    check_response_mask(response_mask, old_values=old_values)
    centre = keep(old_values.detach(), response_mask)
    return values.clamp(centre - value_clip_range, centre + value_clip_range)
