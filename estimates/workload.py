"""What a stage holds and computes: networks, and passes of sequences through them."""

from dataclasses import dataclass
from typing import Literal

from vantage.estimates.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Network:
    """One copy of the model that a stage holds in its device's memory."""

    role: str
    """``policy``, ``reference``, ``critic``, or a reward model by the name of its stage."""
    shape: ModelShape
    is_scalar: bool = False
    """A trunk with a head of one number; else a language model."""
    is_trained: bool = False
    is_bfloat16: bool = False
    """Held in bfloat16; all other weights are float32."""
    adapter_weights: int = 0
    """Of its adapters (LoRA), which alone are trained then, with the head of a reward or value model. 0: it has none."""
    is_held_in_turn: bool = False
    """It is loaded when the one before it is gone: of all such networks the largest counts."""
    shares_base: bool = False
    """Another network of the stage holds the weights beneath."""
    is_in_4_bits: bool = False
    """The matrices of its layers are frozen and held in 4 bits (NF4)."""

    @property
    def weights(self) -> int:
        """Number of its weights, those of adapters left out."""
        return self.shape.trunk_weights + self.shape.hidden_size if self.is_scalar else self.shape.weights

    @property
    def trained_weights(self) -> int:
        """Weights that have gradients and the optimiser's moments."""
        if not self.is_trained:
            return 0
        return self.adapter_weights or self.weights

    @property
    def held_weights(self) -> int:
        """Weights that it has in memory by itself."""
        return self.adapter_weights + (0 if self.shares_base else self.weights)

    @property
    def weights_in_4_bits(self) -> int:
        """Return how many of its weights are held in 4 bits."""
        return self.shape.num_layers * self.shape.layer_matrices if self.is_in_4_bits else 0


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Sequences that go through a network together, in micro-batches."""

    count: float
    """Of one minibatch or rollout, over all ranks."""
    at_once: float
    """The most in one micro-batch of a rank."""
    tokens: float
    """Mean tokens of one, with padding to the longest of its micro-batch."""
    longest: float
    """Tokens of the longest of all."""
    logit_tokens: float = 0.0
    """Mean tokens of one whose logits are computed."""

    def rows_at_once(self, world: int) -> float:
        """Return the rows in one micro-batch of each of so many ranks; at least 1."""
        return max(1.0, min(self.at_once, self.count / world))


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The same forward pass, or forward and backward pass, so many times in a stage."""

    role: str
    does: Literal["train", "score"]
    times: float
    sequences: Sequences
    takes_step: bool = True
    """Each time ends with an optimiser step; of training passes only."""
    has_precision: bool = True
    """It runs in the stage's ``precision``; a pass of a reward's model runs in the type of its weights."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Responses sampled from a network, so many times in a stage."""

    role: str
    times: float
    count: float
    """Responses of one time."""
    at_once: float
    """The most that a rank samples side by side."""
    prompt: float
    """Mean tokens of a prompt, padded to the longest of those sampled side by side."""
    response: float
    """Mean tokens of a response."""
    steps: float
    """Tokens of the longest of those sampled side by side: passes through the network."""
    longest: float
    """Most tokens of a prompt and its response together."""

    def rows_at_once(self, world: int) -> float:
        """Return the rows side by side on each of so many ranks; at least 1."""
        return max(1.0, min(self.at_once, self.count / world))


@dataclass(frozen=True)
class Workload:
    """A stage, as the estimate sees it."""

    networks: tuple[Network, ...]
    passes: tuple[Pass, ...]
    samplings: tuple[Sampling, ...]
    is_bfloat16: bool
    """``precision: bfloat16``."""
    at_once: int
    """The most rows of one micro-batch of a rank."""
    recipe_at_once: int
    """The same as the recipe has it."""
    counts: dict[str, float]
    """What the numbers rest on: rows, optimiser steps, tokens."""
    basis: tuple[str, ...]
    """Where the counts come from, one line for each dataset."""
    is_checkpointed: bool = False
    """``gradient_checkpointing: true``."""

    @property
    def has_adapters(self) -> bool:
        """Return whether any of its networks has adapters; their weights are not cut over GPUs."""
        return any(network.adapter_weights for network in self.networks)

    def network(self, role: str) -> Network:
        """Return the network in a role."""
        return next(network for network in self.networks if network.role == role)
