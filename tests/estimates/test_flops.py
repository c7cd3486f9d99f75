"""FLOPs equal published totals, a hand-worked model, and PyTorch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from vantage.estimates.flops import head_flops, scoring_flops, training_flops, trunk_flops
from vantage.estimates.model_shape import ModelShape, model_shape
from vantage.models.model_config import ModelConfig

LLAMA_7B = model_shape(
    ModelConfig(
        {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "vocab_size": 32000,
        },
        None,
        None,
    )
)


def test_a_token_of_llama_7b_by_hand() -> None:
    # a layer: 4 · 4096² + 3 · 4096 · 11008 = 202,375,168 weights; 32 layers, 2 FLOPs each
    assert trunk_flops(LLAMA_7B, tokens=1, context=0) == 2 * 32 * 202_375_168
    # attention to 4096 positions: 4 · 32 layers · 4096 wide · 4096
    assert trunk_flops(LLAMA_7B, tokens=1, context=4096) == 2 * 32 * 202_375_168 + 2_147_483_648
    assert head_flops(LLAMA_7B, tokens=1) == 2 * 32_000 * 4096


def test_layers_that_are_checkpointed_are_computed_once_more() -> None:
    """Layers and head are computed forward twice, and their backward pass costs as much again. With adapters, the
    backward pass lacks the gradients of the frozen weights."""
    given = {"tokens": 10.0, "context": 100.0, "logit_tokens": 5.0}
    layers = trunk_flops(LLAMA_7B, tokens=10.0, context=100.0)
    head = head_flops(LLAMA_7B, tokens=5.0)
    assert training_flops(LLAMA_7B, **given, is_checkpointed=True) == 4 * layers + 4 * head
    with_adapters = 3 * layers + 3 * 2 * 10 * 1000 + 3 * head
    found = training_flops(LLAMA_7B, **given, adapter_weights=1000, is_checkpointed=True)
    assert found == with_adapters
    assert training_flops(LLAMA_7B, **given, adapter_weights=1000) == with_adapters - layers


def test_the_training_of_gpt_3() -> None:
    # arXiv 2005.14165, table D.1: 3.14e23 for 175 billion weights and 300 billion tokens, without attention
    fields = {"model_type": "gpt2", "n_embd": 12288, "n_layer": 96, "n_head": 96, "vocab_size": 50257}
    shape = model_shape(ModelConfig(fields, None, None))
    assert training_flops(shape, tokens=300e9, context=0, logit_tokens=0) == pytest.approx(3.14e23, rel=0.01)


@pytest.fixture(scope="module")
def small() -> tuple[LlamaForCausalLM, ModelShape]:
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",  # the counter sees the products of this attention
    )
    return LlamaForCausalLM(config), model_shape(ModelConfig(config.to_dict(), None, None))


def test_the_forward_pass_is_what_pytorch_counts(small: tuple[LlamaForCausalLM, ModelShape]) -> None:
    model, shape = small
    ids = torch.randint(0, 200, (5, 24))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, logits_to_keep=7)
    predicted = scoring_flops(shape, tokens=5 * 24, context=24, logit_tokens=5 * 7)
    assert predicted == counter.get_total_flops()


def test_the_backward_pass_is_two_forward_passes(small: tuple[LlamaForCausalLM, ModelShape]) -> None:
    model, shape = small
    ids = torch.randint(0, 200, (5, 24))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.sum().backward()
    head = head_flops(shape, tokens=5 * 24)  # once more than here: it is computed again in our backward pass
    predicted = training_flops(shape, tokens=5 * 24, context=24, logit_tokens=5 * 24) - head
    assert predicted == pytest.approx(counter.get_total_flops(), rel=1e-3)
