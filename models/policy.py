"""A policy as one module: training and rollouts read all its weights in ``forward``."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vantage.models.logprobs import LogProbs, response_logprobs
from vantage.models.sequences import Sequences
from vantage.models.sharding import is_sharded


class PolicyModel(nn.Module):
    """A causal language model, with a value head on its trunk if one is given.

    Sharding (FSDP2) gathers weights only for a module's own forward pass, so no other code may read the weights of a
    training policy: neither its trunk nor its output head's matrix. Results are returned as a dict of tensors, since
    the hooks that gather weights for the backward pass look into dicts and not into dataclasses.
    """

    def __init__(self, causal_lm: PreTrainedModel, value_head: nn.Linear | None = None) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.value_head = value_head

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return self.causal_lm.device

    def forward(
        self,
        sequences: Sequences,
        *,
        temperature: float,
        with_entropy: bool = False,
        reference: "PolicyModel | None" = None,
        with_values: bool = False,
        with_final_values: bool = False,
    ) -> dict[str, Tensor]:
        """Return the requested fields of ``LogProbs``; see ``vantage.models.logprobs.response_logprobs``.

        Args:
            reference: a frozen policy, for the exact KL to it; its weights are read here too, so it is not sharded.
            with_values: whether to return values, with gradients to head and trunk.
            with_final_values: whether to return values at the last token of each response too.

        Raises:
            ValueError: values of a policy without a head, a temperature that is not above 0, or a reference with
                another number of logits.
        """
        if (with_values or with_final_values) and self.value_head is None:
            raise ValueError("this policy has no value head; take its critic's values")
        if reference is not None and is_sharded(reference):
            raise ValueError(
                "the exact KL (kl_kind or kl_loss_kind: full) reads all of the reference's weights, of which each rank "
                "has a part; use resources.distributed.strategy: ddp, or another kind of KL"
            )
        found = response_logprobs(
            self.causal_lm,
            sequences,
            temperature=temperature,
            with_entropy=with_entropy,
            reference=None if reference is None else reference.causal_lm,
            value_head=self.value_head if with_values else None,
            with_final_values=with_final_values,
        )
        return {name: tensor for name, tensor in vars(found).items() if tensor is not None}

    def next_logits(self, **inputs: Any) -> Any:
        """Return the output of the causal language model itself, for sampling."""
        return self.causal_lm(**inputs)

    def logprobs(
        self,
        sequences: Sequences,
        *,
        temperature: float,
        with_entropy: bool = False,
        reference: "PolicyModel | None" = None,
        with_values: bool = False,
    ) -> LogProbs:
        """Return the log-probabilities of one forward pass, as ``LogProbs``."""
        found: dict[str, Tensor] = self(
            sequences,
            temperature=temperature,
            with_entropy=with_entropy,
            reference=reference,
            with_values=with_values,
        )
        return LogProbs(**found)
