"""Rewards: one score per response, its scale, additions to it, and a KL penalty per token."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vantage.algorithms.masking import (
    check_boolean,
    check_response_mask,
    check_shape,
    keep,
)

SCALE_EPSILON = 1e-6
"""Scores whose standard deviation is below this, in their own unit, count as equal up to rounding."""


def shape_rewards(scores: Tensor, kl: Tensor, response_mask: Tensor, *, kl_coef: float) -> Tensor:
    """Return token rewards r_t = −kl_coef · kl_t, plus the sequence's score at its last valid token.

    InstructGPT, arXiv 2203.02155 eq. 2. `scores` (B,), `kl` (B,T) in nats, of the policy that sampled (k1 is
    the estimate that belongs here) → (B,T), detached, 0 outside the mask. The last valid token is the end of
    sequence, or the last token of a truncated response; never a pad. A row without a response token gets no
    reward, not even its score.

    Raises ValueError for unequal shapes.
    """
    check_response_mask(response_mask, kl=kl)
    check_shape("scores", scores, (response_mask.shape[0],))
    tokens_from_here = response_mask.flip(1).cumsum(dim=1).flip(1)
    is_last_token = response_mask & (tokens_from_here == 1)
    penalties = keep(-kl_coef * kl.detach(), response_mask)
    return penalties + keep(scores.detach().unsqueeze(1).expand_as(kl), is_last_token)


def subtract_missing_eos(scores: Tensor, has_eos: Tensor, *, penalty: float) -> Tensor:
    """Return scores (B,) minus `penalty` (≥ 0) where the response did not end by itself (the rule of TRL), detached.

    Raises ValueError for a negative penalty or unequal shapes, TypeError for a `has_eos` that is not boolean.
    """
    if not penalty >= 0:
        raise ValueError(f"penalty={penalty} is subtracted for a missing end of sequence, so it must be ≥ 0")
    _check_has_eos(scores, has_eos)
    return torch.where(has_eos, scores.detach(), scores.detach() - penalty)


def replace_missing_eos(scores: Tensor, has_eos: Tensor, *, score: float) -> Tensor:
    """Return scores (B,) with `score` for responses that did not end by themselves, detached.

    The rule of lm-human-preferences (arXiv 1909.08593), whose score is −1.

    Raises ValueError for unequal shapes, TypeError for a `has_eos` that is not boolean.
    """
    _check_has_eos(scores, has_eos)
    return torch.where(has_eos, scores.detach(), score)


@dataclass(frozen=True)
class RunningMoments:
    """Number of scores seen so far (`count`), their `mean`, and `m2`, the sum of squared deviations from the mean.

    Welford's recursion as Chan, Golub and LeVeque (1983) wrote it for pieces, in float64. The pieces may come
    in any order and from any rank; up to rounding the result is that of all scores at once. The three numbers
    are JSON through `dataclasses.asdict`.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    @property
    def std(self) -> float:
        """The population's standard deviation (ddof 0), in the scores' unit; 0.0 for fewer than 2 scores."""
        return math.sqrt(self.m2 / self.count) if self.count >= 2 else 0.0

    def update(self, scores: Tensor) -> "RunningMoments":
        """Return the moments including these scores (any shape).

        Raises ValueError for a score that is not finite: it would never leave the moments again.
        """
        exact = scores.detach().flatten().to(torch.float64)
        if not bool(torch.isfinite(exact).all()):
            raise ValueError(
                f"scores has {float(exact[~torch.isfinite(exact)][0])}, which would never leave the running "
                "moments again; look at the reward that gave it"
            )
        if exact.numel() == 0:
            return self
        # Relative to the first score, equal scores have a deviation of exactly 0.
        shifted = exact - exact[0]
        mean = shifted.mean()
        m2 = (shifted - mean).square().sum()
        return self.merge(RunningMoments(exact.numel(), float(exact[0] + mean), float(m2)))

    def merge(self, other: "RunningMoments") -> "RunningMoments":
        """Return the moments including the scores of another rank or piece.

        They must be different scores: the ranks' moments of **this** rollout are merged with each other, then
        once with those of all earlier ones.
        """
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        difference = other.mean - self.mean
        return RunningMoments(
            count=count,
            mean=self.mean + difference * other.count / count,
            m2=self.m2 + other.m2 + difference**2 * self.count * other.count / count,
        )


def scale_scores(
    scores: Tensor, moments: RunningMoments, *, subtract_mean: bool, clip: float | None
) -> Tensor:
    """Return R/σ, or (R − μ)/σ with `subtract_mean`, clamped to ±`clip` unless that is None: arXiv 2307.04964 §5.3.1.

    `scores` (B,) → (B,) in float32 or better, detached. `moments` must include these scores: update them first.
    If all scores so far were equal (σ below SCALE_EPSILON), there is no scale, and σ is taken as 1: dividing by
    a small constant instead would make a score of 1 a million.

    Raises ValueError for moments without a score and for a clip that is not positive.
    """
    if moments.count == 0:
        raise ValueError("moments has seen no score; update it with these scores before scaling them")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip={clip} is not positive; use None for no clip")
    sigma = moments.std if moments.std >= SCALE_EPSILON else 1.0
    widened = scores.detach().to(torch.promote_types(scores.dtype, torch.float32))
    scaled = (widened - moments.mean if subtract_mean else widened) / sigma
    return scaled if clip is None else scaled.clamp(min=-clip, max=clip)


def whiten_scores(scores: Tensor) -> Tensor:
    """Return (s − mean)/std over all scores (B,), std with ddof 0; 0 where std is below SCALE_EPSILON: there is no scale then.

    → (B,) in float32 or better, detached.
    """
    exact = scores.detach().double()
    std, mean = torch.std_mean(exact, correction=0)
    whitened = (exact - mean) / std if std >= SCALE_EPSILON else torch.zeros_like(exact)
    return whitened.to(torch.promote_types(scores.dtype, torch.float32))


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """Return DAPO's penalty for the scores of long responses: arXiv 2503.14476 eq. 13, between 0 and −1.

        0 up to max_length − buffer, then ((max_length − buffer) − length)/buffer, −1 from max_length on

    `lengths` (B,), `max_length` and `buffer` in response tokens (the paper's: 20,480 and 4,096) → (B,) in
    float32 or better. A response that ended by itself is penalised as well.

    Raises ValueError for a buffer outside (0, max_length] or a negative length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer={buffer} must be positive and no more than max_length={max_length}")
    if bool((lengths < 0).any()):
        raise ValueError(f"lengths has {int(lengths.min())}; a length is a number of response tokens, ≥ 0")
    return (((max_length - buffer) - lengths.detach()) / buffer).clamp(min=-1.0, max=0.0)


def _check_has_eos(scores: Tensor, has_eos: Tensor) -> None:
    check_boolean("has_eos", has_eos)
    check_shape("has_eos", has_eos, tuple(scores.shape))
