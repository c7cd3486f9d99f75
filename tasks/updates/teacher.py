"""A teacher beside its student: loading, the exact reverse KL as a loss, and as a measurement."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vantage.algorithms.kl_loss import exact_kl_loss
from vantage.algorithms.uncertainty import Estimate, clustered_ratio
from vantage.models.folders import load_tokenizer, tokenizer_digest
from vantage.models.output_head import output_head
from vantage.models.policy import PolicyModel
from vantage.models.sequences import Sequences
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.resolved import ResolvedDistillation
from vantage.schemas.records.job import StageJob
from vantage.tasks.rewards.model_scores import TokenizersDiffer
from vantage.tasks.training import progress, ranks
from vantage.tasks.training.gradients import backward
from vantage.tasks.training.metric_sums import LossSums
from vantage.tasks.training.networks import fixed_policy
from vantage.tasks.training.optimization import Precision, autocast
from vantage.tasks.training.passes import passes_of
from vantage.tasks.updates.teacher_server import ServedTeacher


@dataclass(frozen=True)
class Pair:
    """The student that learns, the frozen teacher, and the temperature of both distributions: that of sampling."""

    student: PolicyModel
    teacher: PolicyModel | ServedTeacher
    temperature: float
    precision: Precision

    @property
    def held_teacher(self) -> PolicyModel:
        """The teacher in this process."""
        assert isinstance(self.teacher, PolicyModel), "only a teacher in this process has all logits"
        return self.teacher


@dataclass(frozen=True)
class ReverseKL:
    """KL(student‖teacher) of a minibatch before its update."""

    reverse_kl: float
    """Mean over response tokens, in nats; an estimate if it is computed from sampled tokens."""
    entropy: float
    """Mean entropy of the student over the same tokens, in nats."""
    logprobs: Tensor
    """(B,T): the student's log-probabilities, in nats; 0 outside the mask."""


def load_teacher(job: StageJob[ResolvedDistillation], student: PolicyModel) -> PolicyModel | ServedTeacher:
    """Return the frozen teacher on the student's device, or a served teacher, which has proved that it reads the
    student's tokens.

    Raises:
        TokenizersDiffer: the teacher reads other tokens than the student, or has another number of logits.
        JudgeUnavailable, JudgeRefused: the teacher's server does not answer.
        ValueError: the variable of the server's key is not set.
    """
    if job.work.teacher_server is not None:
        served = ServedTeacher(job)
        served.prove(load_tokenizer(job.inputs["init"]))
        return served
    named = f"teacher={job.work.teacher!r}"
    if tokenizer_digest(job.inputs["teacher"]) != tokenizer_digest(job.inputs["init"]):
        raise TokenizersDiffer(
            f"{named} has another tokenizer or chat template than init={job.work.init!r}, and the KL compares the probabilities of "
            "equal tokens; use a teacher of the student's family"
        )
    teacher = fixed_policy(job, "teacher", student.device)
    size, of_teacher = (len(output_head(each.causal_lm).weight) for each in (student, teacher))
    if size != of_teacher:
        raise TokenizersDiffer(
            f"{named} has {of_teacher} logits a token, and init={job.work.init!r} has {size}, and the KL sums over one vocabulary; "
            "use a teacher whose embeddings have the same number of rows"
        )
    return teacher


def accumulate_reverse_kl(pair: Pair, minibatch: Sequences, limits: PassLimits) -> ReverseKL:
    """Add the gradient of the minibatch's mean KL(student‖teacher) per response token, micro-batch by micro-batch.

    At each token the KL is summed over the vocabulary (GKD, arXiv 2306.13649, with reverse KL and λ = 1). As there, the
    gradient is that of the KL in the visited states; it ignores that the student's weights decide which states are
    visited.
    """
    num_tokens = int(minibatch.response_mask.sum())
    losses = LossSums("reverse_kl", "entropy")
    logprobs = torch.zeros(minibatch.response_mask.shape, device=pair.student.device)
    for part in passes_of(minibatch, limits):
        micro = part.select(minibatch)
        with autocast(pair.precision, pair.student.device):
            found = pair.student.logprobs(
                micro, temperature=pair.temperature, with_entropy=True, reference=pair.held_teacher
            )
        assert found.full_kl is not None and found.entropy is not None
        loss = exact_kl_loss(
            found.full_kl, micro.response_mask, aggregation="token", denominator=num_tokens
        ).loss
        backward(part.weight * loss, pair.student, is_last=part.is_last)
        losses.add("reverse_kl", loss, part.weight)
        losses.add(
            "entropy", found.entropy.detach()[micro.response_mask].double().sum() / num_tokens, part.weight
        )
        part.put(found.logprobs.detach(), into=logprobs)
    return ReverseKL(**losses.totals(), logprobs=ranks.total(logprobs))


@torch.no_grad()
def measure_reverse_kl(pair: Pair, responses: Sequences, clusters: Tensor, limits: PassLimits) -> Estimate:
    """Return the mean KL(student‖teacher) per token of given responses; ``clusters`` (N,): their prompts."""
    sums = torch.zeros(len(responses), dtype=torch.float64)
    for part in passes_of(responses, limits):
        progress.phase("measuring", part.done, len(responses))
        with autocast(pair.precision, pair.student.device):
            found = pair.student.logprobs(
                part.select(responses), temperature=pair.temperature, reference=pair.held_teacher
            )
        assert found.full_kl is not None
        part.put(found.full_kl.double().sum(dim=1), into=sums)
    return clustered_ratio(ranks.total(sums), responses.lengths.cpu(), clusters)
