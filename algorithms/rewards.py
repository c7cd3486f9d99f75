"""What the policy is paid: one score per response and a KL penalty per token."""

import torch
from torch import Tensor

from algorithms.masking import check_boolean, check_response_mask, check_shape, keep


def shape_rewards(scores: Tensor, kl: Tensor, response_mask: Tensor, *, kl_coef: float) -> Tensor:
    """Token rewards r_t = −kl_coef · kl_t, plus the sequence's score at its last valid token.

    InstructGPT, arXiv 2203.02155 eq. 2. `scores` (B,), `kl` (B,T) in nats (the k1 estimate of the policy that
    sampled) → (B,T), detached, 0 outside the mask. The last valid token is the end of sequence, or the last
    token of a truncated response; never a pad. A row without a response token gets no reward, its score
    included.

    Raises ValueError for unequal shapes.
    """
    check_response_mask(response_mask, kl=kl)
    check_shape("scores", scores, (response_mask.shape[0],))
    tokens_from_here = response_mask.flip(1).cumsum(dim=1).flip(1)
    is_last_token = response_mask & (tokens_from_here == 1)
    penalties = keep(-kl_coef * kl.detach(), response_mask)
    return penalties + keep(scores.detach().unsqueeze(1).expand_as(kl), is_last_token)


def subtract_missing_eos(scores: Tensor, has_eos: Tensor, *, penalty: float) -> Tensor:
    """Scores (B,) less `penalty` (≥ 0) where the response did not end by itself (the rule of TRL), detached.

    Raises ValueError for a negative penalty or unequal shapes, TypeError for a `has_eos` that is not boolean.
    """
    if not penalty >= 0:
        raise ValueError(f"penalty={penalty} is subtracted for a missing end of sequence, so it must be ≥ 0")
    _check_has_eos(scores, has_eos)
    return torch.where(has_eos, scores.detach(), scores.detach() - penalty)


def replace_missing_eos(scores: Tensor, has_eos: Tensor, *, score: float) -> Tensor:
    """Scores (B,) with `score` in place of those of responses that did not end by themselves, detached.

    The rule of lm-human-preferences (arXiv 1909.08593), whose score is −1.

    Raises ValueError for unequal shapes, TypeError for a `has_eos` that is not boolean.
    """
    _check_has_eos(scores, has_eos)
    return torch.where(has_eos, scores.detach(), score)


def _check_has_eos(scores: Tensor, has_eos: Tensor) -> None:
    check_boolean("has_eos", has_eos)
    check_shape("has_eos", has_eos, tuple(scores.shape))
