"""Losses on preferences, for reward models and for policies (DPO): preferred pairs and rankings."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from vantage.algorithms.aggregation import Denominator, check_denominator
from vantage.algorithms.groups import index_of_groups
from vantage.algorithms.masking import check_shape, keep
from vantage.algorithms.metrics import SumCount, sum_count


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
    """Return Σ_i w_i · −log σ(chosen_i − rejected_i − margin_i) / denominator, over N pairs.

    Bradley-Terry as in InstructGPT, arXiv 2203.02155 eq. 1; the margin is that of Llama 2, arXiv 2307.09288
    eq. 2. Scores (N,); `margin` a float or (N,); `weights` (N,), ≥ 0, 1 if None. For K ranked responses to a
    prompt pass all untied pairs with weight 1/(their number): then the sum of weights is the number of
    prompts. `denominator` is the sum of weights over the whole global minibatch; None takes this call's. A
    pair of weight 0 may have any scores.

    Raises ValueError for a negative weight, unequal shapes, a denominator that is not positive, and, when it
    is None, for no pair of positive weight.
    """
    pairs = tuple(chosen_scores.shape)
    if len(pairs) != 1:
        raise ValueError(f"chosen_scores has shape {pairs}; it must be (N,), one score per pair")
    check_shape("rejected_scores", rejected_scores, pairs)
    is_weighted = weights is not None
    weights = torch.ones_like(chosen_scores) if weights is None else weights.detach()
    check_shape("weights", weights, pairs)
    if is_weighted and not bool((weights >= 0).all()):
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


def ranking_loss(
    scores: Tensor, ranks: Tensor, group_ids: Tensor, *, denominator: Denominator | None = None
) -> PreferenceLoss:
    """Return Bradley-Terry over all untied pairs of each prompt, weighted 1/(their number): a mean over prompts.

    InstructGPT, arXiv 2203.02155 eq. 1 (whose 1/(K choose 2) is this weight if no ranks are tied). `scores` (N,)
    of one completion each; `ranks` (N,), the lower the better, equal for a tie; `group_ids` (N,) the prompt
    of each, integers of any value in any order. All completions of a prompt must be in one call. A prompt
    whose completions are all tied contributes nothing. `denominator` is the number of prompts with an untied
    pair, `rankable`, of the whole global minibatch; None takes this call's. `pair_accuracy` and `score_gap`
    count each untied pair once, whatever its weight.

    Raises ValueError for unequal shapes, ranks that are NaN, a denominator that is not positive, and, when it
    is None, for no untied pair; TypeError for ids that are not integers.
    """
    if scores.dim() != 1:
        raise ValueError(f"scores has shape {tuple(scores.shape)}; it must be (N,), one score per completion")
    check_shape("ranks", ranks, tuple(scores.shape))
    better, worse, prompt = untied_pairs(ranks, group_ids)
    pairs_of_prompt = torch.bincount(prompt, minlength=1)
    if denominator is None and better.numel():
        denominator = int((pairs_of_prompt > 0).sum())
    widened = scores.to(torch.promote_types(scores.dtype, torch.float32))
    weights = 1 / pairs_of_prompt[prompt].to(widened.dtype)
    return bradley_terry(widened[better], widened[worse], weights=weights, denominator=denominator)


def rankable(ranks: Tensor, group_ids: Tensor) -> int:
    """Return the number of prompts with an untied pair: the contribution to the denominator of `ranking_loss`.

    Shapes and errors are as for `ranking_loss`.
    """
    return int((torch.bincount(untied_pairs(ranks, group_ids)[2]) > 0).sum())


@dataclass(frozen=True)
class PairMeasures:
    """Measurements of each held-out pair (P,) in float64, to be averaged; margins do not enter.

    `correct`: 1 where the chosen response scores strictly higher, so a tie is a miss. `score_gap`: chosen −
    rejected. `loss`: −log σ(score_gap), in nats.
    """

    correct: Tensor
    score_gap: Tensor
    loss: Tensor


def measure_pairs(chosen_scores: Tensor, rejected_scores: Tensor) -> PairMeasures:
    """Return the terms that `bradley_terry` averages, for each pair; scores (P,) of both sides.

    Raises ValueError for unequal shapes.
    """
    check_shape("rejected_scores", rejected_scores, tuple(chosen_scores.shape))
    score_gap = chosen_scores.detach().double() - rejected_scores.detach().double()
    return PairMeasures(correct=(score_gap > 0).double(), score_gap=score_gap, loss=-logsigmoid(score_gap))


def implicit_rewards(logprobs: Tensor, ref_logprobs: Tensor, *, beta: float) -> Tensor:
    """Return DPO's implicit reward β·(log π − log π_ref) of whole responses (N,), arXiv 2305.18290 §4.

    At least float32; the gradient flows through `logprobs` alone.
    """
    precise = torch.promote_types(torch.promote_types(logprobs.dtype, ref_logprobs.dtype), torch.float32)
    return beta * (logprobs.to(precise) - ref_logprobs.detach().to(precise))


@dataclass(frozen=True)
class DPOLoss:
    """`loss` is 0-d and differentiable; the metrics count each pair.

    `pair_accuracy`: the chosen response's implicit reward is strictly above the rejected one's. `reward_gap`:
    chosen − rejected.
    """

    loss: Tensor
    pair_accuracy: SumCount
    reward_gap: SumCount


def dpo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    denominator: Denominator | None = None,
) -> DPOLoss:
    """Return −log σ(r_chosen − r_rejected) by the implicit reward r = beta · (log π − log π_ref): arXiv 2305.18290 eq. 7.

    `label_smoothing` is the probability ε that a label is wrong: −(1 − ε)·log σ(gap) − ε·log σ(−gap), the
    conservative DPO of https://ericmitchell.ai/cdpo.pdf.

    All tensors (N,): the log-probability of a whole response, the **sum** over its tokens, in nats. Means over
    the tokens make it the length-normalised DPO of Tülu 3, arXiv 2411.15124. The gradient flows through
    the first two. `denominator` is the number of pairs of the whole global minibatch; None takes this call's.

    Raises ValueError for a beta that is not positive, a smoothing outside [0, ½), unequal shapes, a denominator
    that is not positive, and, when it is None, for no pair.
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
    losses = logistic_losses(reward_gaps, label_smoothing=label_smoothing)
    return mean_over_pairs(losses, reward_gaps, denominator=denominator)


def logistic_losses(
    reward_gaps: Tensor, *, target_margin: float = 0.0, label_smoothing: float = 0.0
) -> Tensor:
    """Return −(1 − ε)·log σ(gap − γ) − ε·log σ(γ − gap) of each pair (N,), in nats.

    γ is `target_margin`, and ε is `label_smoothing`, the probability that a label is wrong.

    Raises ValueError for a smoothing outside [0, ½).
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing={label_smoothing:g} is not in [0, 0.5): from one half on, labels would count reversed"
        )
    logits = reward_gaps - target_margin
    if not label_smoothing:
        return -logsigmoid(logits)
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


def mean_over_pairs(losses: Tensor, reward_gaps: Tensor, *, denominator: Denominator | None) -> DPOLoss:
    """Return Σ losses / denominator, and the metrics of the gaps; both (N,).

    `denominator` is the number of pairs of the whole global minibatch; None takes this call's.

    Raises ValueError for a denominator that is not positive and, when it is None, for no pair.
    """
    if denominator is None:
        if not losses.numel():
            raise ValueError("there is no pair, so the mean over this minibatch is undefined")
        denominator = losses.numel()
    check_denominator(denominator)
    every = torch.ones_like(reward_gaps, dtype=torch.bool)
    return DPOLoss(
        loss=losses.sum() / denominator,
        pair_accuracy=sum_count(reward_gaps > 0, every),
        reward_gap=sum_count(reward_gaps, every),
    )


def check_pairs(beta: float, chosen_logprobs: Tensor, **others: Tensor) -> None:
    """Raise ValueError unless `beta` is positive and all log-probabilities are (N,), one per response."""
    if not beta > 0:
        raise ValueError(f"beta={beta} is not positive; the paper uses 0.1 to 0.5")
    pairs = tuple(chosen_logprobs.shape)
    if len(pairs) != 1:
        raise ValueError(f"chosen_logprobs has shape {pairs}; it must be (N,), one sum per response")
    for name, tensor in others.items():
        check_shape(name, tensor, pairs)


@dataclass(frozen=True)
class CentringLoss:
    """`loss` is 0-d and differentiable; `pair_mean` is (chosen + rejected) / 2."""

    loss: Tensor
    pair_mean: SumCount


def score_centring(
    chosen_scores: Tensor, rejected_scores: Tensor, *, denominator: Denominator | None = None
) -> CentringLoss:
    """Return Σ_i (chosen_i + rejected_i)² / denominator over N pairs, which centres scores on 0; Bradley-Terry does not
    determine their zero.

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


def untied_pairs(ranks: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (better, worse, prompt) of each pair (P,) of completions of one prompt whose ranks differ.

    The first two are places in `ranks` (N,), the third numbers the prompts from 0 on, in the order of their ids.
    """
    if ranks.dim() != 1:
        raise ValueError(f"ranks has shape {tuple(ranks.shape)}; it must be (N,), one rank per completion")
    if bool((ranks != ranks).any()):
        raise ValueError(
            "ranks has a NaN, which is neither better, worse nor a tie; leave the completion out"
        )
    prompts, _ = index_of_groups(group_ids, ranks.shape[0])
    of_one_prompt = prompts.unsqueeze(1) == prompts
    better, worse = (of_one_prompt & (ranks.unsqueeze(1) < ranks)).nonzero(as_tuple=True)
    return better, worse, prompts[better]
