"""FLOPs and bytes that each part of an iteration cannot do without, and the seconds that these take at a device's rates.

A multiplication and an addition are two FLOPs. A token meets all matrices of the trunk once, 2 FLOPs a weight, and
4·heads·d for each position that it attends to, itself and those before it; only tokens of responses need logits, 2·V·h
each. A backward pass is two forward passes. A prompt is read once for all its responses while they are sampled, and with
each response by the other parts: which of them may share it depends on the minibatch. While a batch is sampled, each token
reads the weights once for all rows and the keys and values of all positions before it, of each row; in bfloat16, two bytes.

The floor of sampling is the sum of products and bytes, since one token's are computed one after the other by the same
kernels; that of the other parts is their products alone. AdamW is counted by its bytes. Nothing is counted that is
elementwise, nor the launch of kernels.

Hand-worked, 8,192 responses, 790 TFLOP/s and 4.8 TB/s (an H200's measured products and its data sheet): 78 s at 0.5B, 257 s
at 1.5B.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.gpu.sizes import Rollout, Size

BFLOAT16 = 2
STEP_BYTES = 40
"""A weight in an optimiser step: its gradient's norm (4) and clipping (8), and AdamW, which reads weight, gradient and moments
and writes all but the gradient (28)."""


@dataclass(frozen=True)
class Rates:
    """What a device does in a second."""

    flops: float
    """Floating-point operations per second in matrix products."""
    bandwidth: float
    """Bytes per second from and to its memory."""


@dataclass(frozen=True)
class Work:
    """What a part cannot do without."""

    flops: float
    read: float = 0.0
    """Bytes of memory, where these bound it beside the products."""
    tokens: int = 0
    """Tokens that it samples, reads or learns from."""

    def seconds(self, rates: Rates) -> float:
        """Return the floor."""
        return self.flops / rates.flops + self.read / rates.bandwidth

    def read_seconds(self, rates: Rates) -> float:
        """Return the seconds of reading its bytes alone."""
        return self.read / rates.bandwidth


def trunk_flops(size: Size, *, first: int, last: int) -> float:
    """Return the trunk's floating-point operations for one row's tokens at positions ``first`` to before ``last``."""
    shape = size.shape
    attended = (last * (last + 1) - first * (first + 1)) // 2
    tokens = last - first
    return shape.num_layers * (2.0 * shape.layer_matrices * tokens + 4.0 * shape.query_width * attended)


def head_flops(size: Size, *, tokens: int) -> float:
    """Return the FLOP of the logits of so many tokens."""
    return 2.0 * size.shape.head_matrix * tokens


def read_weights(size: Size) -> float:
    """Return the bytes of the weights of the policy's layers and output head, which one token of a batch reads."""
    shape = size.shape
    return BFLOAT16 * float(shape.num_layers * shape.layer_matrices + shape.head_matrix)


def read_cache(size: Size, rollout: Rollout) -> float:
    """Return the bytes of keys and values that the tokens of one response read. The first token reads none: it comes with the prompt."""
    shape = size.shape
    a_position = 2.0 * shape.num_layers * shape.kv_width * BFLOAT16
    return a_position * sum(range(rollout.prompt_tokens + 1, rollout.total_tokens))


def works(size: Size, rollout: Rollout, *, sampled_rows: int) -> Mapping[str, Work]:
    """Return part of an iteration → its work, in the order in which they come.

    Args:
        sampled_rows: responses that are sampled side by side.
    """
    rows, total, prompt = rollout.responses, rollout.total_tokens, rollout.prompt_tokens
    response = rollout.response_tokens
    batches = -(-rows // sampled_rows)
    trunk = trunk_flops(size, first=0, last=total)
    head = head_flops(size, tokens=response)
    sampling = Work(
        flops=rollout.prompts * trunk_flops(size, first=0, last=prompt)
        + rows * (trunk_flops(size, first=prompt, last=total - 1) + head),
        read=rows * read_cache(size, rollout) + batches * response * read_weights(size),
        tokens=rows * response,
    )
    shape, steps, positions = size.shape, rollout.minibatches, rows * total
    return {
        "sampling": sampling,
        "reward": Work(rows * trunk, tokens=positions),
        "old log-probabilities": Work(rows * (trunk + head), tokens=positions),
        "reference": Work(rows * (trunk + head), tokens=positions),
        "old values": Work(rows * trunk, tokens=positions),
        "policy update": Work(
            3 * rows * (trunk + head), read=steps * STEP_BYTES * float(shape.weights), tokens=positions
        ),
        "critic update": Work(
            3 * rows * trunk, read=steps * STEP_BYTES * float(shape.trunk_weights), tokens=positions
        ),
    }
