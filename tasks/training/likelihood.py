"""Maximum likelihood of given responses: what fine-tuning, best of n and demonstrations beside a policy's loss share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.supervised_loss import token_nll
from models.policy import PolicyModel
from models.sequences import Sequences
from tasks.training import ranks
from tasks.training.optimization import Precision, autocast


@dataclass(frozen=True)
class Likelihood:
    """How likely a minibatch was before its update."""

    nll: float
    """Mean over its response tokens, in nats."""
    logprobs: Tensor
    """(B,T), in nats; 0 outside the mask."""


def accumulate_nll(
    policy: PolicyModel,
    minibatch: Sequences,
    *,
    temperature: float,
    microbatch_size: int | None,
    precision: Precision,
    coef: float = 1.0,
) -> Likelihood:
    """Add the gradient of ``coef`` times the minibatch's mean token NLL, micro-batch by micro-batch, of this rank's rows.

    Args:
        temperature: of the distribution that is to learn: 1 for demonstrations. What was sampled at another one is
            learnt at that one: else the policy would get a little sharper with every iteration, whatever its score.
    """
    denominator = minibatch.response_mask.sum()
    total = 0.0
    logprobs = torch.zeros(minibatch.response_mask.shape, device=policy.device)
    for part in ranks.parts(len(minibatch), microbatch_size):
        micro = minibatch.select(part.rows)
        with autocast(precision, policy.device):
            of_micro = policy.logprobs(micro, temperature=temperature).logprobs
        loss = token_nll(of_micro, micro.response_mask, denominator=denominator).loss
        (part.weight * coef * loss).backward()
        total += part.weight * loss.item()
        logprobs[part.rows, : of_micro.shape[1]] = part.weight * of_micro.detach()
    return Likelihood(nll=ranks.total(total), logprobs=ranks.total(logprobs))
