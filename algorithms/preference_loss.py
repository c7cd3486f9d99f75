"""What moves the reward model: pairs of which one was preferred."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from algorithms.aggregation import Denominator, check_denominator
from algorithms.masking import check_shape, keep
from algorithms.metrics import SumCount, sum_count


@dataclass(frozen=True)
class PreferenceLoss:
    """`loss` is 0-d and differentiable; the metrics count each pair of non-zero weight once.

    `pair_accuracy`: chosen scored strictly above rejected, so a tie is a miss. `score_gap`: chosen −
    rejected.
    """

    loss: Tensor
    pair_accuracy: SumCount
    score_gap: SumCount


def bradley_terry(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    *,
    margin: float | Tensor | None = None,
    weights: Tensor | None = None,
    denominator: Denominator | None = None,
) -> PreferenceLoss:
    """Σ_i w_i · −log σ(chosen_i − rejected_i − margin_i) / denominator, over N pairs.

    Bradley-Terry as in InstructGPT, arXiv 2203.02155 eq. 1; the margin is that of Llama 2, arXiv 2307.09288
    eq. 2. Scores (N,); `margin` a float or (N,); `weights` (N,), ≥ 0, 1 if None. For K ranked responses to a
    prompt pass all untied pairs with weight 1/(their number): then the sum of weights is the number of
    prompts. `denominator` is the sum of weights over the whole global minibatch; None takes this call's. A
    pair of weight 0 may hold anything.

    Raises ValueError for a negative weight, unequal shapes, a denominator that is not positive, and, when it
    is None, for no pair of positive weight.
    """
    pairs = tuple(chosen_scores.shape)
    if len(pairs) != 1:
        raise ValueError(f"chosen_scores has shape {pairs}; it must be (N,), one score per pair")
    check_shape("rejected_scores", rejected_scores, pairs)
    weights = torch.ones_like(chosen_scores) if weights is None else weights.detach()
    check_shape("weights", weights, pairs)
    if not bool((weights >= 0).all()):
        raise ValueError("weights has a negative or undefined entry; a pair's weight is ≥ 0, and 0 skips it")
    counts = weights > 0
    score_gap = keep(chosen_scores, counts) - keep(rejected_scores, counts)
    preference_logits = score_gap - _kept_margin(margin, counts)
    if denominator is None:
        if not bool(counts.any()):
            raise ValueError(
                "no pair of positive weight, so the mean over this minibatch is undefined; "
                "for a micro-batch, pass the denominator of its whole minibatch"
            )
        denominator = keep(weights, counts).sum()
    check_denominator(denominator)
    return PreferenceLoss(
        loss=(keep(weights, counts) * -logsigmoid(preference_logits)).sum() / denominator,
        pair_accuracy=sum_count(score_gap > 0, counts),
        score_gap=sum_count(score_gap, counts),
    )


@dataclass(frozen=True)
class CentringLoss:
    """`loss` is 0-d and differentiable; `pair_mean` is (chosen + rejected) / 2."""

    loss: Tensor
    pair_mean: SumCount


def score_centring(
    chosen_scores: Tensor, rejected_scores: Tensor, *, denominator: Denominator | None = None
) -> CentringLoss:
    """Σ_i (chosen_i + rejected_i)² / denominator, over N pairs: gives scores, whose zero Bradley-Terry leaves open, one.

    arXiv 2312.09244 eq. 2. Scores (N,). `denominator` is the number of pairs of the whole global minibatch; None takes
    this call's.

    Raises ValueError for unequal shapes, a denominator that is not positive, and, when it is None, for no pair.
    """
    pairs = tuple(chosen_scores.shape)
    check_shape("rejected_scores", rejected_scores, pairs)
    if denominator is None:
        if not chosen_scores.numel():
            raise ValueError("there is no pair, so the mean over this minibatch is undefined")
        denominator = chosen_scores.numel()
    check_denominator(denominator)
    total = chosen_scores + rejected_scores
    return CentringLoss(
        loss=total.square().sum() / denominator,
        pair_mean=sum_count(0.5 * total, torch.ones_like(total, dtype=torch.bool)),
    )


def _kept_margin(margin: float | Tensor | None, counts: Tensor) -> float | Tensor:
    if margin is None:
        return 0.0
    if not isinstance(margin, Tensor):
        return float(margin)
    check_shape("margin", margin, tuple(counts.shape))
    return keep(margin.detach(), counts)
