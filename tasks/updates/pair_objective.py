"""The loss of a ``dpo`` stage by its switches, in training and on held-out pairs."""

from dataclasses import dataclass

from torch import Tensor

from vantage.algorithms.pair_losses import ipo, log_odds, orpo, simpo, squared_losses
from vantage.algorithms.preference_loss import DPOLoss, dpo, implicit_rewards, logistic_losses
from vantage.schemas.recipe.resolved import ResolvedDirectPreferenceOptimization


@dataclass(frozen=True)
class PairLogprobs:
    """Log-probabilities (N,) of whole responses to N prompts, in nats, and the policy's of each token (2N,T).

    They are sums over a response's tokens, or means if the stage's loss takes means. Those of the reference are None if
    the loss reads none.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor | None
    ref_rejected: Tensor | None
    per_token: Tensor


def takes_means(work: ResolvedDirectPreferenceOptimization) -> bool:
    """Return whether the loss reads the mean log-probability of a response's tokens, and not their sum."""
    return work.length_normalised or not work.reads_reference


def loss_of(
    logprobs: PairLogprobs, work: ResolvedDirectPreferenceOptimization, *, denominator: float
) -> DPOLoss:
    """Return the loss on a micro-batch of pairs; for ``orpo`` only the part that compares responses."""
    chosen, rejected = logprobs.chosen, logprobs.rejected
    if work.loss == "simpo":
        assert work.target_margin is not None, "a rule of the recipe"
        return simpo(
            chosen,
            rejected,
            beta=work.beta,
            target_margin=work.target_margin,
            label_smoothing=work.label_smoothing,
            denominator=denominator,
        )
    if work.loss == "orpo":
        return orpo(chosen, rejected, beta=work.beta, denominator=denominator)
    assert logprobs.ref_chosen is not None and logprobs.ref_rejected is not None
    sides = (chosen, rejected, logprobs.ref_chosen, logprobs.ref_rejected)
    if work.loss == "ipo":
        return ipo(*sides, beta=work.beta, denominator=denominator)
    return dpo(*sides, beta=work.beta, label_smoothing=work.label_smoothing, denominator=denominator)


def rewards_of(logprobs: PairLogprobs, work: ResolvedDirectPreferenceOptimization) -> tuple[Tensor, Tensor]:
    """Return the rewards that the loss compares, of the chosen and of the rejected responses (N,)."""
    if work.loss == "orpo":
        return log_odds(logprobs.chosen), log_odds(logprobs.rejected)
    if logprobs.ref_chosen is None or logprobs.ref_rejected is None:
        return work.beta * logprobs.chosen, work.beta * logprobs.rejected
    return (
        implicit_rewards(logprobs.chosen, logprobs.ref_chosen, beta=work.beta),
        implicit_rewards(logprobs.rejected, logprobs.ref_rejected, beta=work.beta),
    )


def held_out_losses(reward_gaps: Tensor, work: ResolvedDirectPreferenceOptimization) -> Tensor:
    """Return the loss of each pair (N,) by its gap; for ``orpo`` only the part that compares responses."""
    if work.loss == "ipo":
        return squared_losses(reward_gaps, beta=work.beta)
    losses = logistic_losses(
        reward_gaps, target_margin=work.target_margin or 0.0, label_smoothing=work.label_smoothing
    )
    return work.beta * losses if work.loss == "orpo" else losses
