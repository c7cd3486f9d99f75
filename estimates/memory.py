"""Bytes of a decoder-only transformer: weights, optimiser, KV cache, activations.

Weights, gradients and AdamW's two moments are float32, 16 bytes a weight; ``precision: bfloat16`` is autocast, which
adds a copy of the weights in bfloat16 (2 bytes) while a pass runs. The usual mixed precision, with weights and
gradients in bfloat16 beside a float32 copy, has 16 bytes a weight as well (ZeRO, arXiv 1910.02054 §3.1).
"""

from vantage.estimates.model_shape import ModelShape

FLOAT32, BFLOAT16, FLOAT64 = 4, 2, 8
NF4 = 0.5 + FLOAT32 / 64
"""Bytes of a weight in 4 bits: 64 weights share one scale."""
ADAM_BYTES = 2 * FLOAT32
"""Bytes of the two moments of a weight."""
ADAM_8_BIT_BYTES = 2 * (1 + FLOAT32 / 256)
"""The same in 8 bits: 256 values of a moment share one scale. Small tensors, which stay in float32, are not counted."""
CHUNK_LOGITS, CHUNK_LOGITS_OF_GPU = 2**23, 2**26
"""Equal to ``vantage.models.chunked_logits.CHUNK_ELEMENTS``: logits that training and scoring hold at once on a CPU, and on a GPU."""
CHUNK_COPIES = 3
"""Tensors of a chunk's size that exist together: logits, log-probabilities, and their gradient."""


def weight_bytes(weights: int, *, bytes_each: float = FLOAT32) -> int:
    """Return the bytes of a network's weights."""
    return round(weights * bytes_each)


def optimizer_bytes(weights: int, *, in_8_bits: bool = False) -> int:
    """Return the bytes of AdamW's moments."""
    return round(weights * (ADAM_8_BIT_BYTES if in_8_bits else ADAM_BYTES))


def gradient_bytes(weights: int) -> int:
    """Return the bytes of the gradients, which are float32 like the weights."""
    return weights * FLOAT32


def kv_cache_bytes(shape: ModelShape, *, tokens: float, bytes_each: int) -> float:
    """Return 2 · L · kv heads · d · bytes per token (Pope et al., arXiv 2211.05102 §2.1)."""
    return 2.0 * shape.num_layers * shape.kv_width * bytes_each * tokens


def decoding_bytes(shape: ModelShape, *, rows: float) -> float:
    """Return the bytes of tensors over the vocabulary while a token of ``rows`` responses is drawn.

    These are logits, scaled logits and log-probabilities in float32, and probabilities and their sums in float64.
    """
    return rows * shape.vocab_size * (3 * FLOAT32 + 2 * FLOAT64)


def layer_activation_bytes(shape: ModelShape, *, is_bfloat16: bool) -> int:
    """Return the bytes that one layer keeps of one token for the backward pass.

    Tensors are counted as by Korthikanti et al. (arXiv 2205.05198, eq. 1), but without dropout, and with attention that
    does not keep its matrix (FlashAttention, arXiv 2205.14135). Before each of the two halves: the residual stream, the
    normalised stream, and the input of the matrices, h each. Attention: rotated queries and keys, values, and its
    output. Feed-forward: gate, activation, up and their product (without a gate: the input of
    the activation and its output). Under autocast the residual stream stays float32, the rest is bfloat16, and every
    matrix keeps a copy of its input: three for queries, keys and values, and one or two for the feed-forward part.
    """
    streams = 4 * shape.hidden_size
    attention = 2 * shape.query_width + 2 * shape.kv_width
    feed_forward = (4 if shape.family.is_gated else 2) * shape.intermediate_size
    copies = 3 + (2 if shape.family.is_gated else 1) if is_bfloat16 else 2
    narrow = BFLOAT16 if is_bfloat16 else FLOAT32
    return streams * FLOAT32 + (copies * shape.hidden_size + attention + feed_forward) * narrow


def training_activation_bytes(
    shape: ModelShape,
    *,
    tokens: float,
    logit_tokens: float,
    is_bfloat16: bool,
    is_checkpointed: bool = False,
    chunk_logits: int = CHUNK_LOGITS,
) -> float:
    """Return the bytes that a forward pass over ``tokens`` tokens, including padding, keeps, with the logits of one
    chunk.

    With checkpointed gradients: the input of every layer, and all tensors of the layer that is computed again.
    """
    layer = layer_activation_bytes(shape, is_bfloat16=is_bfloat16)
    layers = shape.num_layers * layer
    if is_checkpointed:
        layers = shape.num_layers * shape.hidden_size * FLOAT32 + layer
    ends = 3 * shape.hidden_size * FLOAT32
    return tokens * (layers + ends) + logit_bytes(shape, logit_tokens=logit_tokens, chunk_logits=chunk_logits)


def scoring_activation_bytes(
    shape: ModelShape,
    *,
    tokens: float,
    logit_tokens: float,
    is_bfloat16: bool,
    chunk_logits: int = CHUNK_LOGITS,
) -> float:
    """Return the most bytes of a forward pass without gradients: one layer's tensors, and the logits of one chunk."""
    layer = layer_activation_bytes(shape, is_bfloat16=is_bfloat16)
    return tokens * layer + logit_bytes(shape, logit_tokens=logit_tokens, chunk_logits=chunk_logits)


def logit_bytes(shape: ModelShape, *, logit_tokens: float, chunk_logits: int) -> float:
    """Return the bytes of the chunk of tokens whose logits are held at once."""
    return min(logit_tokens * shape.vocab_size, max(chunk_logits, shape.vocab_size)) * FLOAT32 * CHUNK_COPIES
