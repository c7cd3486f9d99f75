"""Maximum likelihood of given responses, shared by fine-tuning, best of n, and demonstrations beside a policy's loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vantage.algorithms.supervised_loss import token_nll
from vantage.models.policy import PolicyModel
from vantage.models.sequences import Sequences
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.tasks.data.examples import Completions
from vantage.tasks.training import progress, ranks
from vantage.tasks.training.gradients import backward
from vantage.tasks.training.metric_sums import LossSums
from vantage.tasks.training.optimization import Precision, autocast
from vantage.tasks.training.passes import packed_passes, passes


@dataclass(frozen=True)
class Likelihood:
    """Likelihood of a minibatch before its update."""

    nll: float
    """Mean over the learnt tokens, in nats."""
    logprobs: Tensor
    """(B,T), in nats; 0 outside the mask."""


@dataclass(frozen=True)
class MeasuredLikelihood:
    """Likelihood of held-out responses by row: (N,) each, float64 and integers, on the CPU."""

    nll: Tensor
    """Sum over the response's tokens, EOS included, in nats."""
    num_tokens: Tensor
    clusters: Tensor
    """The number of each row's prompt."""


@torch.no_grad()
def measure_likelihood(
    policy: PolicyModel, examples: Completions, *, limits: PassLimits
) -> MeasuredLikelihood:
    """Return the likelihood of the responses at temperature 1."""
    nll = torch.zeros(len(examples), dtype=torch.float64)
    num_tokens = torch.tensor(examples.num_learnt())
    for part in passes(examples.lengths(), limits):
        progress.phase("measuring", part.done, len(examples))
        batch = examples.batch(part.rows).to(policy.device)
        logprobs = policy.logprobs(batch, temperature=1.0).logprobs
        part.put(-logprobs.double().masked_fill(~batch.learnt, 0.0).sum(dim=1), into=nll)
    return MeasuredLikelihood(ranks.total(nll), num_tokens, examples.clusters())


def accumulate_nll(
    policy: PolicyModel,
    minibatch: Sequences,
    *,
    temperature: float,
    limits: PassLimits,
    precision: Precision,
    coef: float = 1.0,
    packing: bool = False,
    completes: bool = True,
) -> Likelihood:
    """Add the gradient of ``coef`` times the minibatch's mean token NLL, over this rank's rows, micro-batch by micro-batch.

    Args:
        temperature: temperature of the distribution that learns: 1 for demonstrations, and for sampled responses the
            temperature at which they were sampled. Otherwise the policy would get sharper with every iteration,
            whatever its score. packing: whether several rows share a row of a pass; the limits then count rows of a
            pass. completes: whether the policy's gradient is complete with this minibatch; then the sums over ranks
            begin.
    """
    denominator = int(minibatch.learnt.sum())
    losses = LossSums("nll")
    logprobs = torch.zeros(minibatch.response_mask.shape, device=policy.device)
    for part in (packed_passes if packing else passes)(minibatch.known.totals, limits):
        micro = part.select(minibatch)
        with autocast(precision, policy.device):
            of_micro = policy.logprobs(micro, temperature=temperature).logprobs
        loss = token_nll(of_micro, micro.learnt, denominator=denominator).loss
        backward(part.weight * coef * loss, policy, is_last=completes and part.is_last)
        losses.add("nll", loss, part.weight)
        part.put(of_micro.detach(), into=logprobs)
    return Likelihood(nll=losses.totals()["nll"], logprobs=ranks.total(logprobs))
