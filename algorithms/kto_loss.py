"""Loss of a policy on single responses that are desirable or not: KTO."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vantage.algorithms.aggregation import Denominator, check_denominator
from vantage.algorithms.masking import check_boolean, check_shape
from vantage.algorithms.metrics import SumCount, sum_count
from vantage.algorithms.preference_loss import implicit_rewards


@dataclass(frozen=True)
class KTOLoss:
    """`loss` is 0-d and differentiable.

    `desirable_margin`: beta · (log π/π_ref − z) over desirable responses; `undesirable_margin`: beta ·
    (z − log π/π_ref) over the others. A larger margin means that the policy follows the labels better.
    """

    loss: Tensor
    desirable_margin: SumCount
    undesirable_margin: SumCount


def kto(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    is_desirable: Tensor,
    *,
    reference_point: float,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    denominator: Denominator | None = None,
) -> KTOLoss:
    """Return Σ_i w_i · (1 − σ(margin_i)) / denominator: arXiv 2402.01306 eq. 7.

    margin = beta · (log π/π_ref − z) of a desirable response and beta · (z − log π/π_ref) of another one; w is
    `desirable_weight` or `undesirable_weight` (the paper's λ_D, λ_U), and z is `reference_point`. The paper's loss
    E[λ_y − v], v = λ_y · σ(margin), is the same.

    `logprobs`, `ref_logprobs` (N,): the **sum** over a response's tokens, in nats; the gradient flows through
    the first. `is_desirable` (N,) boolean. `denominator` is the number of responses of the whole global
    minibatch, desirable or not; None takes this call's.

    Raises ValueError for a beta that is not positive, a reference point below 0, unequal shapes, a denominator
    that is not positive, and, when it is None, for no response; TypeError for labels that are not boolean.
    """
    if not beta > 0:
        raise ValueError(f"beta={beta} is not positive; the paper uses 0.1")
    if not reference_point >= 0:
        raise ValueError(
            f"reference_point={reference_point} is below 0; a KL divergence is not: clamp its estimate"
        )
    responses = tuple(logprobs.shape)
    if len(responses) != 1:
        raise ValueError(f"logprobs has shape {responses}; it must be (N,), one sum per response")
    check_shape("ref_logprobs", ref_logprobs, responses)
    check_boolean("is_desirable", is_desirable)
    check_shape("is_desirable", is_desirable, responses)
    if denominator is None:
        if not logprobs.numel():
            raise ValueError("there is no response, so the mean over this minibatch is undefined")
        denominator = logprobs.numel()
    check_denominator(denominator)
    rewards = implicit_rewards(logprobs, ref_logprobs, beta=beta)
    margins = label_margins(rewards, is_desirable, reference_reward=beta * reference_point)
    losses = kto_losses(margins)
    weights = label_weights(is_desirable, desirable=desirable_weight, undesirable=undesirable_weight)
    return KTOLoss(
        loss=(weights.to(losses) * losses).sum() / denominator,
        desirable_margin=sum_count(margins, is_desirable),
        undesirable_margin=sum_count(margins, ~is_desirable),
    )


def kto_losses(margins: Tensor) -> Tensor:
    """Return 1 − σ(margin) of each response (N,), computed as σ(−margin), which does not round small values to 0."""
    return torch.sigmoid(-margins)


def label_margins(rewards: Tensor, is_desirable: Tensor, *, reference_reward: float) -> Tensor:
    """Return reward − reference of each desirable response and reference − reward of each other one, (N,)."""
    return torch.where(is_desirable, rewards - reference_reward, reference_reward - rewards)


def label_weights(is_desirable: Tensor, *, desirable: float, undesirable: float) -> Tensor:
    """Return the weight of each response (N,) by its label, in float64."""
    weights = torch.full(is_desirable.shape, undesirable, dtype=torch.float64, device=is_desirable.device)
    return weights.masked_fill(is_desirable, desirable)


def clamped_kl(log_ratios: SumCount) -> float:
    """Return max(0, mean of log π/π_ref over responses to **other** prompts), in nats: z₀ of arXiv 2402.01306.

    It is 0 if no response was counted. It has no gradient.
    """
    return max(0.0, log_ratios.mean()) if log_ratios.count.item() else 0.0
