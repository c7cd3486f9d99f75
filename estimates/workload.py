"""The workload of a stage: the networks that it holds, and the passes of sequences through them."""

from dataclasses import dataclass
from typing import Literal

from vantage.estimates.asked_servers import Asked
from vantage.estimates.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Network:
    """One copy of the model that a stage holds in its device's memory."""

    role: str
    """``policy``, ``reference``, ``critic``, the name of a reward model's stage, or the role of a model that judges."""
    shape: ModelShape
    is_scalar: bool = False
    """Whether it is a trunk with a scalar head; otherwise it is a language model."""
    is_trained: bool = False
    is_bfloat16: bool = False
    """Whether it is held in bfloat16; all other weights are float32."""
    adapter_weights: int = 0
    """Number of weights in its adapters (LoRA); then only these are trained, with the head of a reward or value model.
    0: it has none."""
    is_held_in_turn: bool = False
    """Whether it is loaded only after the previous network was removed; of all such networks only the largest
    counts."""
    shares_base: bool = False
    """Whether another network of the stage holds the base weights of its adapters."""
    is_offloaded: bool = False
    """Whether its weights are in host memory, and on the device only for its passes."""
    is_in_4_bits: bool = False
    """Whether the matrices of its layers are frozen and held in 4 bits (NF4)."""

    @property
    def weights(self) -> int:
        """Number of its weights without those of adapters."""
        return self.shape.trunk_weights + self.shape.hidden_size if self.is_scalar else self.shape.weights

    @property
    def trained_weights(self) -> int:
        """Weights that have gradients and the optimiser's moments."""
        if not self.is_trained:
            return 0
        return self.adapter_weights or self.weights

    @property
    def weights_in_4_bits(self) -> int:
        """Return the number of its weights that are held in 4 bits."""
        return self.shape.num_layers * self.shape.layer_matrices if self.is_in_4_bits else 0


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Sequences that go through a network together, in micro-batches."""

    count: float
    """Number of sequences in one minibatch or rollout, over all ranks."""
    at_once: float
    """Most sequences in one micro-batch of a rank."""
    tokens: float
    """Mean tokens of a sequence, with padding to the longest of its micro-batch."""
    longest: float
    """Number of tokens of the longest sequence."""
    logit_tokens: float = 0.0
    """Mean number of a sequence's tokens whose logits are computed."""

    def rows_at_once(self, world: int) -> float:
        """Return the rows in one micro-batch of each of ``world`` ranks; at least 1."""
        return max(1.0, min(self.at_once, self.count / world))


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One forward pass, or forward and backward pass, with the number of times that a stage computes it."""

    role: str
    does: Literal["train", "score"]
    times: float
    sequences: Sequences
    takes_step: bool = True
    """Whether an optimiser step follows each pass; only for training passes."""
    has_precision: bool = True
    """Whether it uses the stage's ``precision``; a pass of a reward's model uses the type of its weights."""
    in_update: bool = False
    """Whether it is part of an iteration's update, which begins after the next rollout has begun (``rollout.ahead:
    1``)."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Responses sampled from a network, with the number of times that a stage samples them."""

    role: str
    times: float
    count: float
    """Number of responses sampled each time."""
    at_once: float
    """Most responses that a rank samples at once."""
    prompt: float
    """Mean tokens of a prompt, padded to the longest of those sampled at once."""
    response: float
    """Mean tokens of a response."""
    steps: float
    """Tokens of the longest response of those sampled at once, which is the number of passes through the network."""
    longest: float
    """Most tokens of a prompt and its response together."""
    is_rollout: bool = False
    """Whether it is the rollout of each iteration; all but the first may begin ahead (``rollout.ahead: 1``)."""

    def rows_at_once(self, world: int) -> float:
        """Return the responses sampled at once on each of ``world`` ranks; at least 1."""
        return max(1.0, min(self.at_once, self.count / world))


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The vLLMs that sample for a stage."""

    place: Literal["process", "servers", "url"]
    count: int
    """Number of engines: servers, or one in the process of each rank (``engine_timing.on_ranks``)."""
    max_rows: int | None
    """``rollout.max_rows``."""
    is_beside: bool = False
    """Whether ``rollout.ahead: 1`` is set: the engine samples while the stage trains."""
    tensor_parallel: int = 1
    """``rollout.tensor_parallel``."""
    gathers: bool = False
    """Whether an engine in the process of a rank gathers the other ranks' parts of the weights for each update (fsdp2)."""

    @property
    def own_gpus(self) -> int:
        """GPUs of the stage on which only servers run."""
        return self.count * self.tensor_parallel if self.place == "servers" else 0


@dataclass(frozen=True)
class Workload:
    """Workload of a stage, from which its memory and seconds are estimated."""

    networks: tuple[Network, ...]
    passes: tuple[Pass, ...]
    samplings: tuple[Sampling, ...]
    is_bfloat16: bool
    """``precision: bfloat16``."""
    at_once: int
    """Most rows of one micro-batch of a rank."""
    recipe_at_once: int
    """Most rows of one micro-batch in the recipe itself."""
    counts: dict[str, float]
    """Counts behind the estimate: rows, optimiser steps, tokens."""
    basis: tuple[str, ...]
    """Sources of the counts, one line for each dataset."""
    is_checkpointed: bool = False
    """``gradient_checkpointing: true``."""
    has_8_bit_states: bool = False
    """``optimizer_states: 8bit``."""
    has_host_optimizer: bool = False
    """Whether the optimiser's state lies in host memory."""
    engine: Engine | None = None
    """vLLMs that sample the responses; None: the loop samples them."""
    asked: tuple[Asked, ...] = ()
    """Questions to judges and reward servers. Their time and money are in no estimate of this machine."""

    @property
    def has_packed_base(self) -> bool:
        """Return whether the stage trains or reads adapters on a base in 4 bits, whose weights are not sharded over
        GPUs."""
        return any(network.adapter_weights and network.is_in_4_bits for network in self.networks)

    def network(self, role: str) -> Network:
        """Return the network with a role."""
        return next(network for network in self.networks if network.role == role)
