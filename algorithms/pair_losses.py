"""Losses of a policy on preferred pairs besides DPO: IPO, and two that read no reference (SimPO, ORPO)."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from vantage.algorithms.aggregation import Denominator
from vantage.algorithms.preference_loss import (
    DPOLoss,
    check_pairs,
    implicit_rewards,
    logistic_losses,
    mean_over_pairs,
)


def ipo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    denominator: Denominator | None = None,
) -> DPOLoss:
    """Return (h − 1/(2·beta))², h = log π/π_ref(chosen) − log π/π_ref(rejected): arXiv 2310.12036 eq. 17, beta its τ.

    Unlike DPO's, the loss has its minimum at a finite h. All tensors (N,): sums over the tokens, as in the paper,
    or their means, as in TRL. `reward_gap` is beta·h. The gradient flows through the first two. `denominator` is
    the number of pairs of the whole global minibatch; None takes this call's.

    Raises ValueError for a beta that is not positive, unequal shapes, a denominator that is not positive, and,
    when it is None, for no pair.
    """
    check_pairs(
        beta,
        chosen_logprobs,
        rejected_logprobs=rejected_logprobs,
        ref_chosen_logprobs=ref_chosen_logprobs,
        ref_rejected_logprobs=ref_rejected_logprobs,
    )
    reward_gaps = implicit_rewards(chosen_logprobs, ref_chosen_logprobs, beta=beta) - implicit_rewards(
        rejected_logprobs, ref_rejected_logprobs, beta=beta
    )
    return mean_over_pairs(squared_losses(reward_gaps, beta=beta), reward_gaps, denominator=denominator)


def squared_losses(reward_gaps: Tensor, *, beta: float) -> Tensor:
    """Return ((gap − ½) / beta)² of each pair (N,): IPO's (h − 1/(2·beta))² with gap = beta·h, in nats²."""
    return ((reward_gaps - 0.5) / beta).square()


def simpo(
    chosen_mean_logprobs: Tensor,
    rejected_mean_logprobs: Tensor,
    *,
    beta: float,
    target_margin: float,
    label_smoothing: float = 0.0,
    denominator: Denominator | None = None,
) -> DPOLoss:
    """Return −log σ(r_chosen − r_rejected − γ) by r = beta · (mean log-probability per token): arXiv 2405.14734 eq. 6.

    γ is `target_margin`; `label_smoothing` is as in `dpo`. Both tensors (N,): the **mean** over a response's
    tokens, in nats. `reward_gap` is r_chosen − r_rejected, without γ. `denominator` is the number of pairs of
    the whole global minibatch; None takes this call's.

    Raises ValueError for a beta that is not positive, a smoothing outside [0, ½), unequal shapes, a denominator
    that is not positive, and, when it is None, for no pair.
    """
    check_pairs(beta, chosen_mean_logprobs, rejected_mean_logprobs=rejected_mean_logprobs)
    reward_gaps = beta * _precise(chosen_mean_logprobs) - beta * _precise(rejected_mean_logprobs)
    losses = logistic_losses(reward_gaps, target_margin=target_margin, label_smoothing=label_smoothing)
    return mean_over_pairs(losses, reward_gaps, denominator=denominator)


def orpo(
    chosen_mean_logprobs: Tensor,
    rejected_mean_logprobs: Tensor,
    *,
    beta: float,
    denominator: Denominator | None = None,
) -> DPOLoss:
    """Return beta · −log σ(log odds(chosen) − log odds(rejected)): the part of ORPO that compares, arXiv 2403.07691 eq. 7.

    beta is the paper's λ (eq. 6). The other part, the negative log-likelihood of the chosen responses, is
    `token_nll`. Both tensors (N,): the **mean** over a response's tokens, in nats. `reward_gap` is the log odds
    ratio. `denominator` is the number of pairs of the whole global minibatch; None takes this call's.

    Raises ValueError for a beta that is not positive, unequal shapes, a denominator that is not positive, and,
    when it is None, for no pair.
    """
    check_pairs(beta, chosen_mean_logprobs, rejected_mean_logprobs=rejected_mean_logprobs)
    reward_gaps = log_odds(chosen_mean_logprobs) - log_odds(rejected_mean_logprobs)
    return mean_over_pairs(beta * -logsigmoid(reward_gaps), reward_gaps, denominator=denominator)


def log_odds(mean_logprobs: Tensor) -> Tensor:
    """Return log(P / (1 − P)) of each response (N,), P = exp(mean log-probability per token): arXiv 2403.07691 eq. 4.

    At least float32. A P that was rounded to 1 has infinite odds; it counts as the largest number below 1 in that
    type.
    """
    precise = _precise(mean_logprobs)
    below_one = precise.clamp(max=-torch.finfo(precise.dtype).eps / 2)
    return below_one - torch.log(-torch.expm1(below_one))


def _precise(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
