"""Bytes equal numbers of the literature by hand, and what PyTorch really keeps for the backward pass."""

import pytest
import torch
from transformers import AutoModel, LlamaConfig, PretrainedConfig

from vantage.estimates.memory import (
    gradient_bytes,
    kv_cache_bytes,
    layer_activation_bytes,
    optimizer_bytes,
    training_activation_bytes,
    weight_bytes,
)
from vantage.estimates.model_shape import ModelShape, model_shape
from vantage.models.model_config import ModelConfig


def shape_of(config: PretrainedConfig) -> ModelShape:
    return model_shape(ModelConfig(config.to_dict(), None, None))


def test_adamw_takes_sixteen_bytes_a_weight() -> None:
    # ZeRO, arXiv 1910.02054, figure 1: 7.5 billion weights take 120 GB
    weights = 7_500_000_000
    assert weight_bytes(weights) + gradient_bytes(weights) + optimizer_bytes(weights) == 120e9


def test_the_kv_cache_of_opt_13b() -> None:
    # arXiv 2309.06180 §3: 800 KB a token = 2 (key and value) · 5120 (hidden) · 40 (layers) · 2 (bytes)
    shape = shape_of(LlamaConfig(hidden_size=5120, num_hidden_layers=40, num_attention_heads=40))
    assert kv_cache_bytes(shape, tokens=1, bytes_each=2) == 800 * 1024


def test_grouped_queries_shrink_the_cache() -> None:
    # Llama 3 8B: 32 layers, 8 of 32 heads hold keys, 128 wide: 2 · 32 · 8 · 128 · 2 = 131072
    shape = shape_of(
        LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
    )
    assert kv_cache_bytes(shape, tokens=1, bytes_each=2) == 131_072


def test_a_layer_of_llama_7b_by_hand() -> None:
    # per token: 4h of streams in float32 = 4 · 4096 · 4 = 65,536 bytes; then 2h of inputs (5h under autocast), 4h of
    # attention (q, k, v, output) and 4 · 11008 of the feed-forward part: 24,576 + 44,032 = 68,608 numbers (80,896)
    shape = shape_of(LlamaConfig(hidden_size=4096, intermediate_size=11008, num_attention_heads=32))
    assert layer_activation_bytes(shape, is_bfloat16=False) == 65_536 + 68_608 * 4
    assert layer_activation_bytes(shape, is_bfloat16=True) == 65_536 + 80_896 * 2


def test_checkpointed_layers_keep_their_inputs_and_one_layer_is_computed_again() -> None:
    """For a token of Llama 7B they keep the inputs of 32 layers, each of 4096 float32, the 339,968 bytes of one layer,
    and 3 more states at the ends."""
    shape = shape_of(LlamaConfig(hidden_size=4096, intermediate_size=11008, num_attention_heads=32))
    given = {"tokens": 1.0, "logit_tokens": 0.0, "is_bfloat16": False}
    kept = training_activation_bytes(shape, **given, is_checkpointed=True)  # type: ignore[arg-type]
    assert kept == 32 * 16_384 + 339_968 + 3 * 16_384
    assert training_activation_bytes(shape, **given) == 32 * 339_968 + 3 * 16_384  # type: ignore[arg-type]


SMALL = {"vocab_size": 100, "hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 5}
CONFIGS = {
    "llama": LlamaConfig(**SMALL, intermediate_size=352),
    "grouped": LlamaConfig(**SMALL, intermediate_size=352, num_key_value_heads=2),
}


def kept_bytes(config: PretrainedConfig, *, rows: int, tokens: int, is_bfloat16: bool) -> int:
    """Return bytes that autograd keeps of a forward pass of the trunk, each storage once, without the weights themselves."""
    torch.manual_seed(0)
    model = AutoModel.from_config(config)
    ids = torch.randint(0, 100, (rows, tokens))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            kept[place] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bfloat16),
    ):
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        output.last_hidden_state.float().sum()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("is_bfloat16", [False, True])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_activations_are_what_autograd_keeps(config: PretrainedConfig, is_bfloat16: bool) -> None:
    shape = shape_of(config)
    predicted = training_activation_bytes(shape, tokens=4 * 64, logit_tokens=0, is_bfloat16=is_bfloat16)
    if is_bfloat16:  # autograd also keeps autocast's copies of the matrices, which count as weights
        predicted += 2 * shape.num_layers * shape.layer_matrices
    kept = kept_bytes(config, rows=4, tokens=64, is_bfloat16=is_bfloat16)
    assert predicted == pytest.approx(kept, rel=0.02)
