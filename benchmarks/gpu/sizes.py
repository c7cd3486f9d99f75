"""The models and the rollout that are timed, and what of it fits into a device's memory."""

from dataclasses import dataclass

from vantage.estimates.memory import (
    BFLOAT16,
    FLOAT32,
    decoding_bytes,
    kv_cache_bytes,
    training_activation_bytes,
)
from vantage.estimates.model_shape import LLAMA, ModelShape

ADAMW_BYTES = 4 * FLOAT32
"""Bytes of a weight that is trained: itself, its gradient and AdamW's two moments, all float32."""
USED_SHARE = 0.85
"""Share of a device's memory that is planned for; the rest is for kernels' work space and fragments."""


@dataclass(frozen=True)
class Size:
    """A Llama with random weights. Policy, reference, critic and reward model each have this shape."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    has_tied_head: bool = True
    """Whether input and output embeddings are one table."""

    @property
    def shape(self) -> ModelShape:
        """Return the shape as the formulas take it."""
        return ModelShape(
            family=LLAMA,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            num_positions=0,
            has_tied_head=self.has_tied_head,
        )


SIZES = {
    each.name: each
    for each in (
        Size("tiny", 32, 2, 4, 2, 8, 64, 128),
        Size("smollm2", 576, 30, 9, 3, 64, 1536, 49152),  # widths of SmolLM2-135M
        Size("0.5b", 896, 24, 14, 2, 64, 4864, 151936),  # widths of Qwen2.5-0.5B
        Size("1.5b", 1536, 28, 12, 2, 128, 8960, 151936),  # of Qwen2.5-1.5B
        Size("7b", 3584, 28, 28, 4, 128, 18944, 152064, has_tied_head=False),  # of Qwen2.5-7B
    )
}
"""Name on the command line → size."""


@dataclass(frozen=True)
class Rollout:
    """What one iteration samples, and learns from once."""

    prompts: int = 128
    samples: int = 16
    """Responses to each prompt."""
    prompt_tokens: int = 256
    response_tokens: int = 512
    """All responses have so many: no token ends one."""
    minibatches: int = 4
    """Optimiser steps of policy and of critic."""

    @property
    def responses(self) -> int:
        """Responses of one rollout, which are its rows."""
        return self.prompts * self.samples

    @property
    def total_tokens(self) -> int:
        """Tokens of a prompt with its response."""
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True)
class Fit:
    """What is computed at once, so that it fits into memory."""

    sampled_rows: int
    """Responses side by side."""
    pass_tokens: int
    """Positions of one pass over given responses."""


class TooLarge(ValueError):
    """A model, or one row of it, does not fit into the device."""


def network_bytes(size: Size) -> float:
    """Return the bytes of policy and critic with their optimisers, of the reference in float32 and the reward model in
    bfloat16, and of what autocast keeps of one network in bfloat16.
    """
    policy, trunk = size.shape.weights, size.shape.trunk_weights
    return (policy + trunk) * ADAMW_BYTES + policy * FLOAT32 + trunk * BFLOAT16 + policy * BFLOAT16


def fit(size: Size, rollout: Rollout, *, memory: float) -> Fit:
    """Return how many rows and positions fit at once into ``memory`` bytes, as powers of two, or all of them.

    Raises:
        TooLarge: not even one row fits beside the networks.
    """
    left = memory * USED_SHARE - network_bytes(size)
    shape, total = size.shape, rollout.total_tokens
    row = kv_cache_bytes(shape, tokens=2 * total, bytes_each=BFLOAT16) + decoding_bytes(shape, rows=1)
    whole_pass = training_activation_bytes(
        shape, tokens=total, logit_tokens=rollout.response_tokens, is_bfloat16=True
    )
    rows, in_pass = left / row, left / whole_pass
    if rows < 1 or in_pass < 1:
        raise TooLarge(
            f"--size {size.name} with {total} tokens a response needs {network_bytes(size) / 1e9:.1f} GB for its networks and "
            f"{whole_pass / 1e9:.1f} GB for one response; this device has {memory / 1e9:.1f} GB: take a smaller size"
        )
    return Fit(
        sampled_rows=_power_of_two(rows, rollout.responses),
        pass_tokens=total * _power_of_two(in_pass, rollout.responses // rollout.minibatches),
    )


def _power_of_two(most: float, all_of_them: int) -> int:
    """Return the largest power of two that is no more than ``most``; all where these are no more."""
    if most >= all_of_them:
        return all_of_them
    return 1 << (int(most).bit_length() - 1)
