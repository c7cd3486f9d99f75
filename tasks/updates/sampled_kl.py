"""The reverse KL to a teacher from the sampled tokens alone: the teacher's log-probabilities, the loss, a
measurement."""

import torch
from torch import Tensor

from vantage.algorithms.kl import kl_estimate
from vantage.algorithms.kl_loss import reference_kl_loss
from vantage.algorithms.uncertainty import Estimate, clustered_ratio
from vantage.models.policy import PolicyModel
from vantage.models.sequences import Sequences
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.tasks.rollout.rollouts import Sampled
from vantage.tasks.training import progress, ranks
from vantage.tasks.training.gradients import backward
from vantage.tasks.training.metric_sums import LossSums
from vantage.tasks.training.optimization import autocast
from vantage.tasks.training.passes import passes_of
from vantage.tasks.updates.teacher import Pair, ReverseKL


def teacher_logprobs(pair: Pair, responses: Sequences, limits: PassLimits) -> Tensor:
    """Return the teacher's log-probability of each response token (B,T), in nats; 0 outside the mask. All ranks call this."""
    if not isinstance(pair.teacher, PolicyModel):
        return pair.teacher.logprobs(responses).to(pair.student.device)
    return _logprobs(pair, pair.teacher, responses, limits)


def accumulate_sampled_kl(pair: Pair, minibatch: Sampled, taught: Tensor, limits: PassLimits) -> ReverseKL:
    """Add the gradient of the minibatch's mean KL(student‖teacher) per response token, estimated from the sampled tokens.

    With Δ = log π − log π_T of a token that π_old sampled, and ρ = π/π_old without gradient:

        loss = mean of ρ·½Δ², whose gradient ρ·Δ·∇log π has the expectation ∇KL(π‖π_T) (``reference_kl_loss``, k2)
        reverse_kl = mean of ρ·Δ, whose expectation is KL(π‖π_T) (k1)

    ``taught`` (B,T): the teacher's log-probabilities, in nats.
    """
    mask = minibatch.sequences.response_mask
    num_tokens = int(mask.sum())
    losses = LossSums("reverse_kl", "entropy")
    logprobs = torch.zeros(mask.shape, device=pair.student.device)
    for part in passes_of(minibatch.sequences, limits):
        micro = part.select(minibatch.sequences)
        width = micro.response_mask.shape[1]
        teacher, old = (each[part.rows, :width] for each in (taught, minibatch.sampler_logprobs))
        with autocast(pair.precision, pair.student.device):
            found = pair.student.logprobs(micro, temperature=pair.temperature, with_entropy=True)
        assert found.entropy is not None
        loss = reference_kl_loss(
            found.logprobs,
            teacher,
            old,
            micro.response_mask,
            kind="k2",
            aggregation="token",
            denominator=num_tokens,
        ).loss
        backward(part.weight * loss, pair.student, is_last=part.is_last)
        own = found.logprobs.detach()
        kl = (own - old).exp() * kl_estimate(own, teacher, kind="k1")
        for name, values in (("reverse_kl", kl), ("entropy", found.entropy.detach())):
            losses.add(name, values[micro.response_mask].double().sum() / num_tokens, part.weight)
        part.put(own, into=logprobs)
    return ReverseKL(**losses.totals(), logprobs=ranks.total(logprobs))


def measure_sampled_kl(pair: Pair, responses: Sequences, clusters: Tensor, limits: PassLimits) -> Estimate:
    """Return the mean of log π − log π_T per token of the student's own responses; ``clusters`` (N,): their prompts."""
    taught = teacher_logprobs(pair, responses, limits)
    log_ratio = _logprobs(pair, pair.student, responses, limits) - taught
    sums = log_ratio.double().sum(dim=1).cpu()
    return clustered_ratio(sums, responses.lengths.cpu(), clusters)


@torch.no_grad()
def _logprobs(pair: Pair, policy: PolicyModel, responses: Sequences, limits: PassLimits) -> Tensor:
    """Return a policy's log-probability of each response token (B,T), in nats; 0 outside the mask."""
    logprobs = torch.zeros(responses.response_mask.shape, device=pair.student.device)
    for part in passes_of(responses, limits):
        progress.phase("measuring", part.done, len(responses))
        micro = part.select(responses)
        with autocast(pair.precision, pair.student.device):
            found = policy.logprobs(micro, temperature=pair.temperature).logprobs
        part.put(found.masked_fill(~micro.response_mask, 0.0), into=logprobs)
    return ranks.total(logprobs)
