"""Compiled layers compute what the same layers compute as they are written."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from vantage.models import compiled_layers
from vantage.models.compiled_layers import CannotCompile, compile_layers, taken_graphs
from vantage.models.gradient_checkpointing import checkpoint_gradients
from vantage.models.sampling import sample

pytestmark = pytest.mark.slow

TRACED = "aot_eager"
"""A backend that needs no compiler: graphs are made, and run operator by operator."""
SHAPES = ((4, 16), (3, 11), (7, 30), (1, 20), (2, 4))


def llama(layers: int = 3, width: int = 16) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=width,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(4)
    config = GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=64, pad_token_id=0)
    return GPT2LMHeadModel(config).eval()


def batch(rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows * tokens)
    ids = torch.randint(1, 40, (rows, tokens), generator=draw)
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[0, tokens // 2 :] = 0
    return ids, mask


def hidden(model: PreTrainedModel, rows: int, tokens: int) -> Tensor:
    ids, mask = batch(rows, tokens)
    states: Tensor = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    return states[mask.bool()]


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def try_kinds(monkeypatch: pytest.MonkeyPatch, chosen: slice) -> None:
    """Try only some kinds of passes, where a test needs no others: a graph takes a second."""
    kinds = compiled_layers._kinds_of_passes
    monkeypatch.setattr(
        compiled_layers, "_kinds_of_passes", lambda *given, **options: list(kinds(*given, **options))[chosen]
    )


def test_layers_share_graphs_and_shapes_are_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are eight graphs, for 3 layers or 6: with and without gradients, with and without a mask, of one row and of
    several.
    """
    torch._dynamo.reset()  # remove what other tests have compiled
    few, many = llama(3), llama(6)
    assert compile_layers(few, backend=TRACED) == 8
    assert compile_layers(many, backend=TRACED) == 0, "what layers of one kind and width share"
    taken_graphs()
    for rows, tokens in (*SHAPES, (9, 33), (5, 6), (1, 7)):
        hidden(many, rows, tokens).sum().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            hidden(many, rows, tokens)
    assert taken_graphs() == 0
    try_kinds(monkeypatch, slice(1))
    wider = llama(2, width=24).requires_grad_(False)
    assert compile_layers(wider, backend=TRACED) == taken_graphs() > 0, "another width has graphs of its own"


@pytest.mark.parametrize("build", [llama, gpt2])
@pytest.mark.parametrize("forgets", [False, True])
def test_states_and_gradients_are_those_of_the_layers_as_written(
    build: Callable[[], PreTrainedModel], forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    try_kinds(
        monkeypatch, slice(1, 3)
    )  # as those of SHAPES: several rows with padding, and a single one without
    plain, compiled = build(), build()
    if forgets:
        checkpoint_gradients(compiled)
    compile_layers(compiled, backend=TRACED)
    assert all(parameter.grad is None for parameter in compiled.parameters()), "trials leave nothing"
    for rows, tokens in SHAPES:
        expected, found = hidden(plain, rows, tokens), hidden(compiled, rows, tokens)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
        wanted = gradients(plain, expected.square().mean())
        got = gradients(compiled, found.square().mean())
        assert got.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            torch.testing.assert_close(hidden(compiled, rows, tokens), expected.detach(), rtol=0, atol=2e-6)


def test_packed_rows_have_their_graphs_before_the_first_pass() -> None:
    """The graphs are for rows of several sequences and of a single one, and for several rows and one."""
    compile_layers(llama(), backend=TRACED)
    model = llama()
    assert compile_layers(model, packs=True, backend=TRACED) > 0, "beside the graphs of rows of one sequence"
    taken_graphs()
    for rows, lengths in ((4, (5, 9)), (1, (7, 3, 4)), (5, (12,)), (1, (6,)), (2, (13, 2, 2, 3))):
        positions = torch.cat([torch.arange(length) for length in lengths]).repeat(rows, 1)
        packed = {"input_ids": torch.ones_like(positions), "position_ids": positions, "use_cache": False}
        model.base_model(**packed).last_hidden_state.sum().backward()
        with torch.no_grad():
            model.base_model(**packed)
    assert taken_graphs() == 0


def test_gradients_that_are_there_stay_what_they_are() -> None:
    model = llama()
    before = {
        name: gradient.clone()
        for name, gradient in gradients(model, hidden(model, 4, 16).square().mean()).items()
    }
    compile_layers(model, backend=TRACED)
    after = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert len(before) > 10
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], gradient) for name, gradient in before.items())


def test_sampling_runs_the_layers_as_written() -> None:
    """Sampling gives the same bits, and makes no graph for any length."""
    plain, compiled = llama(), llama()
    compile_layers(compiled, backend=TRACED)
    taken_graphs()
    prompts = [[1, 5, 6], [1, 7], [1, 9, 8, 7]]
    settings = {"max_new_tokens": 12, "temperature": 1.0, "eos_token_ids": [2], "pad_token_id": 0, "seed": 5}
    assert sample(compiled, prompts, **settings) == sample(plain, prompts, **settings)
    assert taken_graphs() == 0


def test_a_copy_has_layers_of_its_own() -> None:
    """What is sampled ahead is sampled from a copy, whose weights are other ones after the next update."""
    compiled = llama()
    compile_layers(compiled, backend=TRACED)
    copied = copy.deepcopy(compiled)
    with torch.no_grad():
        before = hidden(copied, 4, 16)
        for parameter in compiled.parameters():
            parameter.mul_(1.5)
        torch.testing.assert_close(hidden(copied, 4, 16), before, rtol=0, atol=0)
        assert not torch.allclose(hidden(compiled, 4, 16), before)


def test_what_cannot_be_compiled_is_as_it_was() -> None:
    model = llama()
    expected = hidden(model, 4, 16)
    with pytest.raises(CannotCompile, match="no_such_backend"):
        compile_layers(model, backend="no_such_backend")
    assert not any("forward" in vars(part) for part in model.modules())
    torch.testing.assert_close(hidden(model, 4, 16), expected, rtol=0, atol=0)
    with pytest.raises(CannotCompile, match="Linear has no layers"):
        compile_layers(nn.Linear(2, 2))
