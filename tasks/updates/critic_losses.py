"""Compute the loss of a critic from its targets, by the form of its head."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vantage.algorithms.critic_heads import own_values, quantile_huber_loss
from vantage.algorithms.value_loss import ValueLoss, value_loss
from vantage.models.heads import ScalarModel, outputs, values
from vantage.models.sequences import Sequences
from vantage.schemas.recipe.critic_head import CriticHead


def predictions(critic: ScalarModel, sequences: Sequences, head: CriticHead) -> Tensor:
    """Return the inputs of the critic's loss: values (B,T), or all outputs (B,T,N) of a head with several; in
    float32."""
    read = values if head.is_scalar else outputs
    return read(critic, sequences).float()


def critic_loss(
    predicted: Tensor,
    old_values: Tensor | None,
    targets: Tensor,
    response_mask: Tensor,
    *,
    head: CriticHead,
    shards: Tensor | None,
    value_clip_range: float | None,
    denominator: int,
) -> ValueLoss:
    """Return the loss of ``predictions``, with the metrics of the critic's value.

    Args:
        shards: (B,), the number of the head that learns from each response; for an ensemble.
    """
    if head.is_scalar:
        return value_loss(
            predicted,
            old_values,
            targets,
            response_mask,
            value_clip_range=value_clip_range,
            denominator=denominator,
        )
    measured = value_loss(
        predicted.detach().mean(dim=-1), None, targets, response_mask, denominator=denominator
    )
    if head.quantiles is not None:
        loss = quantile_huber_loss(
            predicted, targets, response_mask, huber=head.huber, denominator=denominator
        )
        return replace(measured, loss=loss)
    assert shards is not None
    own = value_loss(own_values(predicted, shards), None, targets, response_mask, denominator=denominator)
    return replace(measured, loss=own.loss)


def shards_of(prompts: Sequence[str], head: CriticHead, device: torch.device) -> Tensor | None:
    """Return the number of the head (B,) of an ensemble that learns from each prompt's responses; None without an ensemble.

    A hash of the prompt decides, so that a head never learns from the prompts of another, in any rollout.
    """
    if head.ensemble is None:
        return None
    digests = (hashlib.sha256(f"critic:{prompt}".encode()).digest() for prompt in prompts)
    numbers = [int.from_bytes(digest[:8], "big") % head.ensemble for digest in digests]
    return torch.tensor(numbers, device=device)
