"""FLOPs of a decoder-only transformer; a multiplication and an addition count as two.

A token costs two FLOPs for each weight of a matrix that it is multiplied with (Kaplan et al., arXiv 2001.08361 §2.1;
Korthikanti et al., arXiv 2205.05198, appendix A), and the backward pass twice as many as the forward pass. Attention
adds 4·a·d for each pair of positions: QKᵀ and the product with the values.

Here the keys of the whole padded sequence are counted, not half of them: batches are padded, so attention gets a mask
as a tensor and also computes masked pairs.
"""

from vantage.estimates.model_shape import ModelShape


def trunk_flops(shape: ModelShape, *, tokens: float, context: float) -> float:
    """Return the FLOPs of the forward pass of all layers over ``tokens`` tokens, each of which attends to ``context``
    positions."""
    attention = 4 * shape.num_layers * shape.query_width * context
    return tokens * (2.0 * shape.num_layers * shape.layer_matrices + attention)


def head_flops(shape: ModelShape, *, tokens: float) -> float:
    """Return the FLOPs of the logits of ``tokens`` tokens: 2·V·h each."""
    return 2.0 * tokens * shape.head_matrix


def scoring_flops(shape: ModelShape, *, tokens: float, context: float, logit_tokens: float) -> float:
    """Return the FLOPs of one forward pass, with the logits of some of its tokens (none for a reward or value model)."""
    return trunk_flops(shape, tokens=tokens, context=context) + head_flops(shape, tokens=logit_tokens)


def training_flops(
    shape: ModelShape,
    *,
    tokens: float,
    context: float,
    logit_tokens: float,
    adapter_weights: int = 0,
    is_checkpointed: bool = False,
) -> float:
    """Return the FLOPs of a forward and backward pass: three times the layers' forward pass, and four times the head's.

    ``vantage.models.logprobs`` computes logits again in the backward pass, instead of keeping them. With adapters,
    frozen weights have no gradient, which saves a third, and the adapters' own weights are added. Checkpointed layers
    are computed once more.
    """
    layers = trunk_flops(shape, tokens=tokens, context=context)
    head = head_flops(shape, tokens=logit_tokens)
    again = layers if is_checkpointed else 0.0
    if adapter_weights:
        return 2 * layers + again + 3 * 2.0 * tokens * adapter_weights + 3 * head
    return 3 * layers + again + 4 * head
