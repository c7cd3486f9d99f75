"""A policy that learns responses, beside its reference."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vantage.models.folders import tokenizer_digest
from vantage.models.policy import PolicyModel
from vantage.models.sequences import Sequences
from vantage.schemas.records.job import StageJob
from vantage.tasks.rewards.model_scores import TokenizersDiffer
from vantage.tasks.training.offloading import on_device
from vantage.tasks.training.optimization import Precision, autocast


@dataclass(frozen=True)
class Models:
    """The policy that learns, its reference (None: the loss reads none), and the temperature of both distributions.

    The temperature is the one at which the policy is sampled, so that the distribution that will answer learns the
    pairs. The paper has 1.
    """

    policy: PolicyModel
    reference: PolicyModel | None
    temperature: float


def both_logprobs(models: Models, batch: Sequences, *, precision: Precision) -> tuple[Tensor, Tensor | None]:
    """Return the policy's and the reference's log-probabilities (n,T) of any responses, in nats; only the policy's have
    a gradient.

    The reference computes first: if it is offloaded, it has left the device before the policy keeps tensors for its
    backward pass.
    """
    of_reference = None
    with autocast(precision, batch.input_ids.device):
        if models.reference is not None:
            with torch.no_grad(), on_device(models.reference):
                of_reference = models.reference.logprobs(batch, temperature=models.temperature).logprobs
        per_token = models.policy.logprobs(batch, temperature=models.temperature).logprobs
    return per_token, of_reference


def refuse_another_tokenizer(job: StageJob[Any], *, reference: str | None, init: str) -> None:
    """Refuse a reference that reads other tokens than the policy.

    Raises:
        TokenizersDiffer: the reference has another tokenizer; ``reference`` and ``init`` are the names in the recipe.
    """
    if tokenizer_digest(job.inputs["reference"]) != tokenizer_digest(job.inputs["init"]):
        raise TokenizersDiffer(
            f"reference={reference!r} has another tokenizer than init={init!r}; "
            "use a reference that was trained from the same model"
        )
