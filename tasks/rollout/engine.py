"""What samples responses for a stage: a port, and the sampler of this process behind it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models.policy import PolicyModel
from models.sampling import Samples, sample
from tasks.data.examples import Codec
from tasks.training import progress
from tasks.training.optimization import Precision, autocast


class RolloutEngine(Protocol):
    """Samples from a policy, in this process or in another."""

    def generate(
        self, prompts: Sequence[list[int]], *, count: int, seed: int, greedy: bool = False
    ) -> Samples:
        """``count`` responses to each prompt's ids, those of a prompt in a row, with the log-probability of each id.

        The same seed, prompts and weights give the same responses. ``greedy`` takes the likeliest ids instead.
        """

    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Sample from these weights (name → tensor of the causal language model) from now on."""


@dataclass(frozen=True)
class LocalEngine:
    """Samples in this process, from the very tensors that train or from a copy of them."""

    model: PreTrainedModel
    codec: Codec
    microbatch_size: int | None
    """Responses that are sampled side by side; None: all."""
    precision: Precision
    """Of the arithmetic: that of training, where the policy learns from what is sampled."""

    def generate(
        self, prompts: Sequence[list[int]], *, count: int, seed: int, greedy: bool = False
    ) -> Samples:
        """See ``RolloutEngine`` and ``models.sampling.sample``."""
        repeated = [prompt for prompt in prompts for _ in range(count)]
        limit = self.codec.generation.max_response_tokens

        def show(ended: int, token: int) -> None:
            progress.phase("sampling", ended, len(repeated), note=f"token {token} of {limit}")

        with autocast(self.precision, self.model.device):
            return sample(
                self.model,
                repeated,
                max_new_tokens=limit,
                temperature=self.codec.generation.temperature,
                eos_token_ids=self.codec.stop_token_ids,
                pad_token_id=self.codec.pad_token_id,
                seed=seed,
                greedy=greedy,
                microbatch_size=self.microbatch_size,
                on_token=show,
            )

    @torch.no_grad()
    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the weights; those that are the model's own tensors are there already.

        Raises:
            KeyError: the model has no weight of this name.
        """
        own = dict(self.model.named_parameters())
        for name, weight in weights:
            if own[name] is not weight:
                own[name].copy_(weight)


def load_engine(
    policy: PolicyModel, codec: Codec, *, microbatch_size: int | None, precision: Precision = "float32"
) -> RolloutEngine:
    """The engine that samples from ``policy``; it has to be given the weights after they have changed."""
    return LocalEngine(policy.causal_lm, codec, microbatch_size, precision)
