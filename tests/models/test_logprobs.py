import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
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

from vantage.algorithms.kl import full_kl
from vantage.models.chunked_logits import logits_and_slope
from vantage.models.heads import ScalarModel, scores, values
from vantage.models.logprobs import response_logprobs, token_logprobs
from vantage.models.output_head import OutputHead
from vantage.models.policy import PolicyModel
from vantage.models.sequences import Sequences, collate

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
    # transformers' eager attention takes its softmax in float32, whose rounding depends on the padding and the CPU
    "attn_implementation": "sdpa",
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "bias": lambda: PhiConfig(**{**SIZES, "num_key_value_heads": 2}),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation="sdpa",
    ),
    "softcap": lambda: Gemma2Config(**SIZES, final_logit_softcapping=0.3),
    "divided": lambda: GraniteConfig(**SIZES, logits_scaling=0.5),
    "multiplied": lambda: Cohere2Config(**SIZES, logit_scale=3.0),
}  # fmt: skip
TEMPERATURE = 0.7
GRADIENT = {"rtol": 1e-5, "atol": 1e-6}  # the models' own norms compute in float32, also in a float64 model


def build(name: str, dtype: torch.dtype = torch.float64, *, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
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
    """Return log-probabilities row by row, token by token, from the model's own logits, without padding."""
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


def full_kl_oracle(model: PreTrainedModel, reference: PreTrainedModel, sequences: Sequences) -> Tensor:
    """Return Σ_v π(v)·log(π(v)/π_ref(v)), token by token, from the models' own logits, without padding."""
    kl = torch.zeros(sequences.response_mask.shape, dtype=torch.float64)
    for row in range(len(sequences)):
        prompt, length = int(sequences.prompt_lengths[row]), int(sequences.lengths[row])
        ids = sequences.input_ids[row : row + 1, : prompt + length]
        p, q = (torch.softmax(each(ids).logits[0] / TEMPERATURE, dim=-1) for each in (model, reference))
        for t in range(length):
            kl[row, t] = (p[prompt - 1 + t] * torch.log(p[prompt - 1 + t] / q[prompt - 1 + t])).sum()
    return kl.detach()


def full_logits(model: PreTrainedModel, sequences: Sequences) -> Tensor:
    """Return the model's own logits (B, T, V) that chose each response token, over the temperature."""
    logits = model(sequences.input_ids, attention_mask=sequences.attention_mask).logits
    return logits[torch.arange(len(sequences))[:, None], sequences.response_positions] / TEMPERATURE


def value_head(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(16, 1).to(dtype)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
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


def head_of_logits(vocabulary: int, dtype: torch.dtype = torch.float64) -> OutputHead:
    """Return a head whose hidden states are the logits themselves."""
    return OutputHead(torch.eye(vocabulary, dtype=dtype), None, scale=1.0, softcap=None)


def random_head(seed: int, hidden_size: int, *, softcap: float | None) -> OutputHead:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(7, hidden_size, dtype=torch.float64, generator=generator)
    bias = torch.randn(7, dtype=torch.float64, generator=generator)
    return OutputHead(weight, bias, scale=1.3, softcap=softcap)


def token_full_kl(
    hidden: Tensor, head: OutputHead, ref_hidden: Tensor, ref_head: OutputHead, *, temperature: float
) -> Tensor:
    """Return the divergence at each place, whatever token was chosen there."""
    targets = torch.zeros(len(hidden), dtype=torch.long)
    said = token_logprobs(
        hidden, targets, head, temperature=temperature, reference=(ref_hidden, ref_head), chunk_tokens=2
    )
    assert said.full_kl is not None
    return said.full_kl


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("with_reference", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 2, 100])
def test_the_hand_written_gradient_is_the_numerical_one(
    softcap: float | None, with_entropy: bool, with_reference: bool, chunk_tokens: int
) -> None:
    torch.manual_seed(0)
    head = random_head(1, 3, softcap=softcap)
    # the reference is a model of another width and without a cap
    of_reference = torch.randn(5, 4, dtype=torch.float64), random_head(2, 4, softcap=None)
    targets = torch.tensor([0, 6, 3, 3, 1])

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        said = token_logprobs(
            hidden,
            targets,
            OutputHead(weight, bias, head.scale, softcap),
            temperature=0.8,
            with_entropy=with_entropy,
            reference=of_reference if with_reference else None,
            chunk_tokens=chunk_tokens,
        )
        return tuple(each for each in (said.logprobs, said.entropy, said.full_kl) if each is not None)

    parts = torch.randn(5, 3, dtype=torch.float64), head.weight, head.bias
    leaves = [part.requires_grad_() for part in parts if part is not None]
    assert len(function(*leaves)) == 1 + with_entropy + with_reference
    assert torch.autograd.gradcheck(function, leaves)


def test_a_hand_worked_divergence() -> None:
    # p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4): Σ p·log(p/q) = ½·log 2 + ¼·log ½ + ¼·0 = ¼·log 2
    p, q = torch.tensor([[0.5, 0.25, 0.25]]).double(), torch.tensor([[0.25, 0.5, 0.25]]).double()
    hidden = p.log().requires_grad_()
    kl = token_full_kl(hidden, head_of_logits(3), q.log(), head_of_logits(3), temperature=1.0)
    kl.sum().backward()
    assert kl.tolist() == pytest.approx([math.log(2) / 4])
    # p_v·(log p_v/q_v − KL), with log p/q = (1, −1, 0)·log 2
    expected = torch.tensor([[0.5 * (1 - 0.25), 0.25 * (-1 - 0.25), 0.25 * -0.25]]).double() * math.log(2)
    torch.testing.assert_close(hidden.grad, expected)


def test_temperature_flattens_both_distributions() -> None:
    # at temperature 2, logits 2·log(3) and 0 give p = (3/4, 1/4), against a uniform q:
    # ¾·log(3/2) + ¼·log(1/2)
    hidden = torch.tensor([[2 * math.log(3), 0.0]]).double()
    kl = token_full_kl(
        hidden, head_of_logits(2), torch.zeros_like(hidden), head_of_logits(2), temperature=2.0
    )
    assert kl.tolist() == pytest.approx([0.75 * math.log(1.5) + 0.25 * math.log(0.5)])


def test_a_distribution_has_no_divergence_from_itself_and_nothing_pulls() -> None:
    torch.manual_seed(0)
    head = random_head(1, 3, softcap=1.5)
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    kl = token_full_kl(hidden, head, hidden.detach(), head, temperature=0.8)
    kl.sum().backward()
    assert hidden.grad is not None
    assert kl.tolist() == [0.0] * 5
    assert not hidden.grad.any()


def test_nothing_flows_to_the_reference() -> None:
    torch.manual_seed(0)
    hidden, ref_hidden = (torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    head, ref_head = random_head(1, 3, softcap=None), random_head(2, 3, softcap=None)
    assert ref_head.bias is not None
    ref_head.weight.requires_grad_()
    ref_head.bias.requires_grad_()
    targets = torch.tensor([0, 6, 3, 1])
    said = token_logprobs(hidden, targets, head, temperature=1.0, reference=(ref_hidden, ref_head))
    assert said.full_kl is not None and said.ref_logprobs is not None
    assert not said.ref_logprobs.requires_grad
    (said.logprobs + said.full_kl).sum().backward()
    assert hidden.grad is not None and hidden.grad.any()
    assert ref_hidden.grad is None and ref_head.weight.grad is None and ref_head.bias.grad is None
    assert not token_full_kl(hidden.detach(), head, ref_hidden, ref_head, temperature=1.0).requires_grad


def test_tokens_that_the_policy_never_takes_count_nothing() -> None:
    # in float32 e^−300 is 0; its log-ratio of −300 must neither count nor make a NaN
    head = head_of_logits(3, torch.float32)
    hidden = torch.tensor([[0.0, 0.0, -300.0]], requires_grad=True)
    kl = token_full_kl(hidden, head, torch.zeros(1, 3), head, temperature=1.0)
    kl.sum().backward()
    # ½·log(3/2) twice
    torch.testing.assert_close(kl, torch.tensor([math.log(1.5)]))
    torch.testing.assert_close(hidden.grad, torch.zeros(1, 3), rtol=0, atol=1e-6)


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


class LogitRows(TorchDispatchMode):
    """Counts the tokens whose logits are computed: the rows of every product with `vocabulary` columns."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.count = vocabulary, 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        products = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
        if func in products and output.shape[1] == self.vocabulary:
            self.count += output.shape[0]
        return output


def wide_model() -> PreTrainedModel:
    """Return a model with far more logits than hidden states."""
    return AutoModelForCausalLM.from_config(
        LlamaConfig(**{**SIZES, "vocab_size": 5000, "tie_word_embeddings": False})
    )


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("with_reference", [False, True])
def test_logits_that_are_too_many_are_never_held_together(
    with_entropy: bool, with_reference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vantage.models.logprobs.KEPT_ELEMENTS", 0)
    model, reference = wide_model(), wide_model()
    sequences = collate([[1, 2]] * 8, [[3] * 40] * 8, pad_token_id=0)
    chunk_tokens = 10
    with LargestTensor() as largest:
        result = response_logprobs(
            model,
            sequences,
            temperature=1.0,
            with_entropy=with_entropy,
            reference=reference if with_reference else None,
            chunk_tokens=chunk_tokens,
        )
        wanted = result.logprobs, result.entropy, result.full_kl
        torch.stack([each for each in wanted if each is not None]).sum().backward()
    # nothing is larger than one weight matrix (V·H) or one chunk of logits; B·T·V would be 1.6 million
    assert largest.numel <= 5000 * max(chunk_tokens, SIZES["hidden_size"])
    with LargestTensor() as largest:
        model(sequences.input_ids).logits.sum()
    assert largest.numel >= 8 * 40 * 5000


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("num_models", [1, 2])
@pytest.mark.parametrize("fits", [True, False])
def test_logits_of_each_model_are_computed_once_and_again_backward_only_where_they_are_too_many(
    with_entropy: bool, num_models: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vantage.models.logprobs.KEPT_ELEMENTS", num_models * 47 * 5000 - (0 if fits else 1))
    model, *references = [wide_model() for _ in range(num_models)]
    sequences = collate([[1, 2]] * 3, [[3] * 40, [3] * 7, []], pad_token_id=0)
    with LogitRows(5000) as forward:
        result = response_logprobs(
            model,
            sequences,
            temperature=1.0,
            with_entropy=with_entropy,
            reference=references[0] if references else None,
            value_head=value_head(),
            chunk_tokens=10,
        )
    with LogitRows(5000) as backward:
        wanted = result.logprobs, result.entropy, result.full_kl, result.values
        torch.stack([each for each in wanted if each is not None]).sum().backward()
    assert forward.count == num_models * 47
    assert backward.count == (0 if fits else num_models * 47)


def test_logits_are_kept_only_where_something_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one of four chunks is computed, a pass without gradients keeps only the logits of the chunk before it, and
    a pass with gradients those of all chunks before it."""
    alive: list[int] = []
    seen: list[weakref.ref[Tensor]] = []

    def watching(hidden: Tensor, head: OutputHead, temperature: float) -> tuple[Tensor, Tensor | float]:
        alive.append(sum(each() is not None for each in seen))
        logits, slope = logits_and_slope(hidden, head, temperature)
        seen.append(weakref.ref(logits))
        return logits, slope

    monkeypatch.setattr("vantage.models.logprobs.logits_and_slope", watching)
    head = OutputHead(torch.randn(5, 4, requires_grad=True), None, 1.0, None)
    hidden, targets = torch.randn(4, 4), torch.tensor([0, 1, 2, 3])
    with torch.no_grad():
        token_logprobs(hidden, targets, head, temperature=1.0, chunk_tokens=1)
    assert max(alive) == 1
    alive.clear()
    seen.clear()
    found = token_logprobs(hidden, targets, head, temperature=1.0, chunk_tokens=1)
    assert alive == [0, 1, 2, 3]
    found.logprobs.sum().backward()
    assert len(alive) == 4


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_reference", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_keeping_logits_changes_no_bit(
    softcap: float | None, with_reference: bool, with_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No bit changes, also where a graph goes backward twice and the second time finds no kept logits."""
    results = []
    for elements in (0, 10**6):
        monkeypatch.setattr("vantage.models.logprobs.KEPT_ELEMENTS", elements)
        torch.manual_seed(5)
        hidden = torch.randn(7, 4, requires_grad=True)
        weight = torch.randn(11, 4, requires_grad=True)
        reference = torch.randn(7, 3), OutputHead(torch.randn(11, 3), None, 1.0, None)
        found = token_logprobs(
            hidden,
            torch.tensor([0, 10, 3, 3, 5, 1, 2]),
            OutputHead(weight, None, 1.0, softcap),
            temperature=0.7,
            with_entropy=with_entropy,
            reference=reference if with_reference else None,
            chunk_tokens=3,
        )
        parts = [part for part in (found.logprobs, found.entropy, found.full_kl) if part is not None]
        loss = sum((number + 1) * part.square().sum() for number, part in enumerate(parts))
        loss.backward(retain_graph=True)
        loss.backward()
        results.append([*parts, hidden.grad, weight.grad])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("chunk_tokens", [1, 5, None])
@pytest.mark.parametrize("name", CONFIGS)
def test_full_kl_and_its_gradients_are_those_of_full_logits(name: str, chunk_tokens: int | None) -> None:
    # policy and reference need not be of one architecture
    model, reference, sequences = build(name), build("softcap", seed=1), batch()
    weights = torch.randn(3, *sequences.response_mask.shape, dtype=torch.float64) * sequences.response_mask
    log_p = full_logits(model, sequences).log_softmax(-1)
    log_q = full_logits(reference, sequences).log_softmax(-1).detach()
    chosen, ref_chosen = (
        each.gather(2, sequences.response_ids[:, :, None])[:, :, 0] for each in (log_p, log_q)
    )
    entropy = -(log_p.exp() * log_p).sum(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    loss = (weights[0] * chosen + weights[1] * entropy + weights[2] * kl).sum()
    expected_gradients = gradients(model, loss)

    result = response_logprobs(
        model,
        sequences,
        temperature=TEMPERATURE,
        with_entropy=True,
        reference=reference,
        chunk_tokens=chunk_tokens,
    )

    assert result.full_kl is not None and result.entropy is not None and result.ref_logprobs is not None
    expected = full_kl_oracle(model, reference, sequences)
    torch.testing.assert_close(result.full_kl, expected, rtol=1e-9, atol=1e-9)
    ref_chosen = torch.where(sequences.response_mask, ref_chosen, 0.0)
    torch.testing.assert_close(result.ref_logprobs, ref_chosen, rtol=1e-9, atol=1e-9)
    loss = weights[0] * result.logprobs + weights[1] * result.entropy + weights[2] * result.full_kl
    found = gradients(model, loss.sum())
    assert found.keys() == expected_gradients.keys()
    for parameter, gradient in expected_gradients.items():
        # both come from one pass of the same batch, so the norms' float32 is the same in both
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-9, atol=1e-9, msg=parameter)
    assert all(parameter.grad is None for parameter in reference.parameters())


def test_full_kl_is_that_of_the_formula_on_logits() -> None:
    model, reference, sequences = build("tied"), build("llama", seed=1), batch()
    result = response_logprobs(model, sequences, temperature=TEMPERATURE, reference=reference).full_kl
    expected = full_kl(full_logits(model, sequences), full_logits(reference, sequences))
    assert result is not None
    torch.testing.assert_close(
        result, torch.where(sequences.response_mask, expected, 0.0), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("name", ["tied", "softcap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_policy_has_no_full_kl_from_itself_and_nothing_pulls(name: str, dtype: torch.dtype) -> None:
    model, reference, sequences = build(name, dtype), build(name, dtype), batch()
    kl = response_logprobs(model, sequences, temperature=TEMPERATURE, reference=reference).full_kl
    assert kl is not None and kl.dtype == torch.float32
    assert not kl.any()
    assert not any(gradient.any() for gradient in gradients(model, kl.sum()).values())


def test_a_half_precision_reference_gives_float32_close_to_the_exact() -> None:
    model, sequences = build("llama", torch.float32), batch()
    exact = response_logprobs(
        model, sequences, temperature=1.0, reference=build("llama", torch.float32, seed=1)
    )
    result = response_logprobs(
        model, sequences, temperature=1.0, reference=build("llama", torch.bfloat16, seed=1)
    )
    assert result.full_kl is not None and exact.full_kl is not None
    assert result.full_kl.dtype == torch.float32
    # a reference rounded to 8 bits is another reference, but not by much
    assert not torch.equal(result.full_kl, exact.full_kl)
    torch.testing.assert_close(result.full_kl, exact.full_kl, rtol=0.1, atol=0.05)
    assert all(gradient.isfinite().all() for gradient in gradients(model, result.full_kl.sum()).values())


def test_full_kl_under_autocast_is_that_of_the_logits_under_autocast() -> None:
    sequences = batch()
    model, reference = build("tied", torch.float32), build("llama", torch.float32, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, ref_logits = (
            each(sequences.input_ids, attention_mask=sequences.attention_mask).logits.float()
            for each in (model, reference)
        )
        result = response_logprobs(model, sequences, temperature=1.0, reference=reference).full_kl
    log_p, log_q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1).gather(1, sequences.response_positions)
    assert result is not None and result.dtype == torch.float32
    torch.testing.assert_close(
        result[sequences.response_mask], expected[sequences.response_mask], rtol=1e-5, atol=1e-5
    )
    found = gradients(model, result.sum())
    assert all(gradient.dtype == torch.float32 and gradient.isfinite().all() for gradient in found.values())


def test_a_reference_with_another_vocabulary_is_refused_by_name_and_size() -> None:
    reference = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, "vocab_size": 98}))
    with pytest.raises(
        ValueError, match="LlamaForCausalLM has 97 logits a token and the reference LlamaForCausalLM has 98"
    ):
        response_logprobs(build("llama"), batch(), temperature=1.0, reference=reference)
    reference.name_or_path = "some/other-model"
    with pytest.raises(ValueError, match="the reference some/other-model has 98"):
        response_logprobs(build("llama"), batch(), temperature=1.0, reference=reference)


@pytest.mark.parametrize("name", ["llama", "tied", "gpt2"])
def test_values_on_the_shared_trunk_are_those_of_a_value_model_with_the_same_trunk_and_head(
    name: str,
) -> None:
    model, head = build(name, torch.float32), value_head()
    sequences = batch().select([0, 1, 2])  # a value model refuses the empty response
    result = response_logprobs(model, sequences, temperature=TEMPERATURE, value_head=head).values
    assert result is not None
    torch.testing.assert_close(result, values(ScalarModel(model.base_model, head), sequences))
    assert not result[~sequences.response_mask].any()


def test_the_value_of_a_whole_response_comes_from_the_same_pass_where_it_is_asked_for() -> None:
    model, head, sequences = build("llama", torch.float32), value_head(), batch().select([0, 1, 2])
    without = response_logprobs(model, sequences, temperature=TEMPERATURE, value_head=head)
    assert without.final_values is None
    found = response_logprobs(
        model, sequences, temperature=TEMPERATURE, value_head=head, with_final_values=True
    )
    assert found.values is not None and without.values is not None and found.final_values is not None
    assert torch.equal(found.values, without.values)
    expected = scores(ScalarModel(model.base_model, head), sequences)
    torch.testing.assert_close(found.final_values, expected)


def test_a_policy_computes_what_it_is_asked_for_and_no_more() -> None:
    """This also holds for a policy with a value head, whose values cost memory."""
    policy, sequences = PolicyModel(build("llama", torch.float32), value_head()), batch().select([0, 1, 2])
    assert policy(sequences, temperature=TEMPERATURE).keys() == {"logprobs"}
    asked = {"with_entropy": True, "with_values": True, "with_final_values": True}
    found = policy(sequences, temperature=TEMPERATURE, **asked)
    assert found.keys() == {"logprobs", "entropy", "values", "final_values"}
    found = policy.logprobs(sequences, temperature=TEMPERATURE, reference=policy)
    assert found.full_kl is not None and found.entropy is None and found.values is None


def test_one_pass_gives_log_probabilities_and_values_the_gradients_of_two() -> None:
    model, head, sequences = build("tied"), value_head(torch.float64), batch().select([0, 1, 2])
    both = nn.ModuleList([model, head])
    alone = response_logprobs(model, sequences, temperature=TEMPERATURE).logprobs
    expected_values = values(ScalarModel(model.base_model, head), sequences)
    expected = gradients(both, alone.sin().sum() + 0.5 * expected_values.square().sum())

    result = response_logprobs(model, sequences, temperature=TEMPERATURE, value_head=head)

    assert result.values is not None
    found = gradients(both, result.logprobs.sin().sum() + 0.5 * result.values.square().sum())
    assert found.keys() == expected.keys() == dict(both.named_parameters()).keys()
    for parameter, gradient in expected.items():
        torch.testing.assert_close(found[parameter], gradient, **GRADIENT, msg=parameter)


def test_values_are_float32_from_half_precision_and_under_autocast() -> None:
    sequences = batch()
    half = response_logprobs(
        build("llama", torch.bfloat16), sequences, temperature=1.0, value_head=value_head()
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = response_logprobs(
            build("llama", torch.float32), sequences, temperature=1.0, value_head=value_head()
        )
    for result in (half, autocast):
        assert result.values is not None and result.values.dtype == torch.float32
        # none of them is a bfloat16 number that was only converted to float32
        read = result.values[sequences.response_mask]
        assert (read != read.bfloat16().float()).any()


def test_each_trunk_runs_once_and_the_references_without_a_graph() -> None:
    model, reference, sequences = build("llama"), build("llama", seed=1), batch()
    passes: list[tuple[str, bool]] = []
    for name, each in (("policy", model), ("reference", reference)):
        each.base_model.register_forward_hook(
            lambda *call, name=name: passes.append((name, call[-1].last_hidden_state.requires_grad))
        )
    response_logprobs(
        model,
        sequences,
        temperature=1.0,
        with_entropy=True,
        reference=reference,
        value_head=value_head(torch.float64),
    )
    assert passes == [("policy", True), ("reference", False)]


def test_a_reference_and_a_value_head_leave_the_log_probabilities_as_they_are() -> None:
    model, sequences = build("tied", torch.float32), batch()
    plain = response_logprobs(model, sequences, temperature=TEMPERATURE, with_entropy=True)
    rich = response_logprobs(
        model,
        sequences,
        temperature=TEMPERATURE,
        with_entropy=True,
        reference=build("llama", torch.float32, seed=1),
        value_head=value_head(),
    )
    assert plain.full_kl is None and plain.ref_logprobs is None and plain.values is None
    assert plain.entropy is not None and rich.entropy is not None
    assert torch.equal(plain.logprobs, rich.logprobs)
    assert torch.equal(plain.entropy, rich.entropy)
    found, expected = (
        gradients(model, result.logprobs.sum() + result.entropy.sum()) for result in (rich, plain)
    )
    assert all(torch.equal(found[parameter], gradient) for parameter, gradient in expected.items())


def test_masked_positions_hold_zero_whatever_the_padding_is() -> None:
    model, reference, sequences = build("llama"), build("llama", seed=1), batch()
    garbage = replace(
        sequences,
        input_ids=torch.where(sequences.attention_mask, sequences.input_ids, 77),
        response_ids=torch.where(sequences.response_mask, sequences.response_ids, 77),
    )
    results = [
        response_logprobs(
            model, each, temperature=1.0, reference=reference, value_head=value_head(torch.float64)
        )
        for each in (sequences, garbage)
    ]
    for field in ("logprobs", "full_kl", "ref_logprobs", "values"):
        first, second = (getattr(result, field) for result in results)
        assert torch.equal(first, second)
        assert not first[~sequences.response_mask].any()
        assert first[sequences.response_mask].all()


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
    model = build("llama")
    result = response_logprobs(
        model, sequences, temperature=1.0, reference=model, value_head=value_head(torch.float64)
    )
    assert result.full_kl is not None and result.values is not None
    assert result.logprobs.shape == result.full_kl.shape == result.values.shape == (2, 0)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_above_zero_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="is not above 0"):
        response_logprobs(build("llama"), batch(), temperature=temperature)
