from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    PreTrainedModel,
)

from models.logprobs import response_logprobs, token_logprobs
from models.output_head import OutputHead
from models.sequences import Sequences, collate

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # eager attention runs in float64 on every version
    "attn_implementation": "eager",
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "bias": lambda: PhiConfig(**{**SIZES, "num_key_value_heads": 2}),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation="eager",
    ),
    "softcap": lambda: Gemma2Config(**SIZES, final_logit_softcapping=0.3),
    "divided": lambda: GraniteConfig(**SIZES, logits_scaling=0.5),
    "multiplied": lambda: Cohere2Config(**SIZES, logit_scale=3.0),
}  # fmt: skip
TEMPERATURE = 0.7
GRADIENT = {"rtol": 1e-5, "atol": 1e-6}  # the models' own norms compute in float32, also in a float64 model


def build(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases start at 0, where they would prove nothing
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.to(dtype)


def batch() -> Sequences:
    generator = torch.Generator().manual_seed(1)

    def ids(length: int) -> list[int]:
        return torch.randint(VOCABULARY, (length,), generator=generator).tolist()

    return collate([ids(3), ids(5), ids(1), ids(4)], [ids(6), ids(2), ids(9), []], pad_token_id=0)


def oracle(model: PreTrainedModel, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Row by row, token by token, from the model's own logits, without padding."""
    logprobs = torch.zeros(sequences.response_mask.shape, dtype=torch.float64)
    entropy = torch.zeros_like(logprobs)
    for row in range(len(sequences)):
        prompt, length = int(sequences.prompt_lengths[row]), int(sequences.lengths[row])
        ids = sequences.input_ids[row : row + 1, : prompt + length]
        logits = model(ids).logits[0].double() / TEMPERATURE
        for t in range(length):
            p = torch.softmax(logits[prompt - 1 + t], dim=0)
            logprobs[row, t] = torch.log(p[ids[0, prompt + t]])
            entropy[row, t] = torch.special.entr(p).sum()
    return logprobs, entropy


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("chunk_tokens", [1, 5, None])
@pytest.mark.parametrize("name", CONFIGS)
def test_values_and_gradients_are_those_of_full_logits(name: str, chunk_tokens: int | None) -> None:
    model, sequences = build(name), batch()
    weights = torch.randn(2, *sequences.response_mask.shape, dtype=torch.float64)
    expected = oracle(model, sequences)
    expected_gradients = gradients(model, (weights[0] * expected[0] + weights[1] * expected[1]).sum())

    result = response_logprobs(
        model, sequences, temperature=TEMPERATURE, with_entropy=True, chunk_tokens=chunk_tokens
    )

    assert result.entropy is not None
    torch.testing.assert_close(result.logprobs, expected[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(result.entropy, expected[1], rtol=1e-9, atol=1e-9)
    found = gradients(model, (weights[0] * result.logprobs + weights[1] * result.entropy).sum())
    assert found.keys() == expected_gradients.keys()
    for parameter, gradient in expected_gradients.items():
        torch.testing.assert_close(found[parameter], gradient, **GRADIENT, msg=parameter)


def test_without_entropy_the_gradient_is_that_of_the_log_probabilities_alone() -> None:
    model, sequences = build("llama"), batch()
    expected = gradients(model, oracle(model, sequences)[0].square().sum())
    result = response_logprobs(model, sequences, temperature=TEMPERATURE)
    assert result.entropy is None
    found = gradients(model, result.logprobs.square().sum())
    for parameter, gradient in expected.items():
        torch.testing.assert_close(found[parameter], gradient, **GRADIENT, msg=parameter)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_hand_written_gradient_is_the_numerical_one(softcap: float | None) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 6, 3, 3, 1])

    def function(*parts: Tensor) -> tuple[Tensor, Tensor]:
        head = OutputHead(parts[1], parts[2], scale=1.3, softcap=softcap)
        return token_logprobs(parts[0], targets, head, temperature=0.8, with_entropy=True, chunk_tokens=2)

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


class LargestTensor(TorchDispatchMode):
    """Watches every tensor that any operation makes, backward included."""

    numel = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_flatten(output)[0]:
            if isinstance(leaf, Tensor):
                self.numel = max(self.numel, leaf.numel())
        return output


@pytest.mark.parametrize("with_entropy", [False, True])
def test_logits_of_the_whole_batch_are_never_held(with_entropy: bool) -> None:
    config = LlamaConfig(**{**SIZES, "vocab_size": 5000, "tie_word_embeddings": False})
    model = AutoModelForCausalLM.from_config(config)
    prompts, responses = [[1, 2]] * 8, [[3] * 40] * 8
    sequences = collate(prompts, responses, pad_token_id=0)
    chunk_tokens = 10
    with LargestTensor() as largest:
        result = response_logprobs(
            model, sequences, temperature=1.0, with_entropy=with_entropy, chunk_tokens=chunk_tokens
        )
        (
            result.logprobs.sum() if result.entropy is None else (result.logprobs + result.entropy).sum()
        ).backward()
    # nothing is larger than one weight matrix (V·H) or one chunk of logits; B·T·V would be 1.6 million
    assert largest.numel <= 5000 * max(chunk_tokens, config.hidden_size)
    with LargestTensor() as largest:
        model(sequences.input_ids).logits.sum()
    assert largest.numel >= 8 * 40 * 5000


def test_padding_more_or_permuting_the_batch_changes_nothing() -> None:
    model, sequences = build("llama"), batch()
    result = response_logprobs(model, sequences, temperature=1.0).logprobs
    order = [2, 0, 3, 1]
    permuted = response_logprobs(model, sequences.select(order), temperature=1.0).logprobs
    torch.testing.assert_close(permuted, result[order])
    alone = response_logprobs(model, sequences.select([1]), temperature=1.0).logprobs
    torch.testing.assert_close(alone, result[1:2, :2])
    assert torch.equal(
        result[~sequences.response_mask], torch.zeros(int((~sequences.response_mask).sum())).double()
    )


def test_half_precision_weights_give_float32_close_to_the_exact() -> None:
    sequences = batch()
    expected = oracle(build("llama"), sequences)[0]
    model = build("llama", torch.bfloat16)
    result = response_logprobs(model, sequences, temperature=TEMPERATURE)
    assert result.logprobs.dtype == torch.float32
    assert (result.logprobs - expected).abs().max() < 0.25
    result.logprobs.sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {
        torch.bfloat16
    }


def test_autocast_gives_what_the_model_gives_under_autocast() -> None:
    model, sequences = build("llama", torch.float32), batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(sequences.input_ids, attention_mask=sequences.attention_mask).logits
        result = response_logprobs(model, sequences, temperature=1.0).logprobs
    assert result.dtype == torch.float32
    log_p = (
        expected.float()
        .log_softmax(-1)
        .gather(1, sequences.response_positions[:, :, None].expand(-1, -1, VOCABULARY))
    )
    expected = log_p.gather(2, sequences.response_ids[:, :, None])[:, :, 0]
    torch.testing.assert_close(
        result[sequences.response_mask], expected[sequences.response_mask], rtol=0, atol=1e-5
    )
    result.sum().backward()
    assert model.lm_head.weight.grad.dtype == torch.float32
    assert model.lm_head.weight.grad.isfinite().all()


def test_frozen_parameters_get_no_gradient() -> None:
    model, sequences = build("llama"), batch()
    model.lm_head.requires_grad_(False)
    response_logprobs(model, sequences, temperature=1.0).logprobs.sum().backward()
    assert model.lm_head.weight.grad is None
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None


def test_a_batch_of_empty_responses_has_no_log_probabilities() -> None:
    sequences = collate([[1], [2]], [[], []], pad_token_id=0)
    assert response_logprobs(build("llama"), sequences, temperature=1.0).logprobs.shape == (2, 0)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_above_zero_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="is not above 0"):
        response_logprobs(build("llama"), batch(), temperature=temperature)
