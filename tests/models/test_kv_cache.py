"""The cache with spare room gives what transformers' own gives, and copies far less."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicCache, DynamicLayer

from vantage.models import kv_cache, sampling
from vantage.models.kv_cache import ROOM, RoomyLayer, keep_rows, make_room, without_gaps

SMALL = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def filled(length: int, *, rows: int) -> DynamicLayer:
    layer = DynamicLayer()
    layer.update(torch.randn(rows, 2, length, 4), torch.randn(rows, 2, length, 4))
    return layer


def test_tokens_and_rows_are_those_of_the_dynamic_layer() -> None:
    torch.manual_seed(1)
    plain, rows = filled(5, rows=3), torch.tensor([2, 0, 0, 1])
    roomy = RoomyLayer(plain, rows, most=2 * ROOM)
    plain.batch_select_indices(rows)
    for step in range(2 * ROOM + 3):  # beyond what it made room for at once, and beyond ``most``
        count = 2 if step == 4 else 1
        new = torch.randn(2, len(plain.keys), 2, count, 4)
        found, expected = roomy.update(*new), plain.update(*new)
        assert all(map(torch.equal, found, expected))
        assert roomy.get_seq_length() == plain.get_seq_length()
        assert roomy.get_mask_sizes(1) == plain.get_mask_sizes(1)
        if step in (7, ROOM, ROOM + 20):
            kept = torch.arange(len(plain.keys))[1:]
            roomy.batch_select_indices(kept)
            plain.batch_select_indices(kept)


CPU = torch.device("cpu")


@given(st.lists(st.booleans(), max_size=12))
def test_rows_stay_where_they_are_and_the_last_fill_gaps(active: list[bool]) -> None:
    kept = without_gaps(active)
    assert sorted(kept) == [place for place, is_active in enumerate(active) if is_active]
    moved = {gap: place for gap, place in enumerate(kept) if gap != place}
    assert not any(active[gap] for gap in moved), "only where a row has ended"
    assert all(place >= len(kept) for place in moved.values()), "only rows that would be cut off"


@pytest.mark.parametrize("kept", [[0, 4, 2], [3, 4, 2], [0, 1, 2], [5], [5, 1, 2, 3, 4]])
def test_rows_that_leave_are_those_of_the_dynamic_layer(kept: list[int]) -> None:
    torch.manual_seed(1)
    plain, all_rows = filled(5, rows=6), torch.arange(6)
    cache = DynamicCache()
    cache.layers = [RoomyLayer(plain, all_rows, most=2 * ROOM), filled(5, rows=6)]
    unroomy = cache.layers[1].keys.clone()
    held = cache.layers[0]._held[0].data_ptr()
    plain.batch_select_indices(torch.tensor(kept))
    assert torch.equal(keep_rows(cache, kept, CPU), torch.tensor(kept))
    assert cache.layers[0]._held[0].data_ptr() == held, "not copied as a whole"
    assert torch.equal(cache.layers[1].keys, unroomy[kept])
    for _ in range(ROOM + 2):  # within the reserved room, and beyond it
        assert torch.equal(cache.layers[0].keys, plain.keys)
        assert torch.equal(cache.layers[0].values, plain.values)
        new = torch.randn(2, len(kept), 2, 1, 4)
        cache.layers[0].update(*new)
        plain.update(*new)
    assert cache.layers[0]._held[0].shape[0] == len(kept), "room is made for the rows that are left"


def test_keys_are_copied_once_in_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    take_over = RoomyLayer._take_over
    monkeypatch.setattr(
        RoomyLayer, "_take_over", lambda self, *args, **kw: (copies.append(1), take_over(self, *args, **kw))
    )
    tokens = 3 * ROOM - 7
    layer = RoomyLayer(filled(5, rows=3), torch.arange(3), most=tokens)
    for _ in range(tokens):
        layer.update(torch.randn(3, 2, 1, 4), torch.randn(3, 2, 1, 4))
    assert len(copies) == 3, "one for each ROOM tokens; DynamicLayer copies for each token"
    assert layer._held[0].shape[-2] == 5 + tokens, "and no room beyond the last token"


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2))


def llama_eager() -> PreTrainedModel:
    model = llama()
    model.set_attn_implementation("eager")
    return model


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4))


def mistral_with_a_window() -> PreTrainedModel:
    config = MistralConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2, sliding_window=6)
    return MistralForCausalLM(config)


@pytest.mark.parametrize("build", [llama, llama_eager, gpt2, mistral_with_a_window])
def test_samples_are_those_with_transformers_own_cache(
    build: Callable[[], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    model = build()
    prompts = [[1, 7, 9, 11, 4], [1, 8], [1, 8], [1, 7, 9, 11, 4], [1, 30, 31]]
    monkeypatch.setattr(kv_cache, "ROOM", 4)

    def sampled() -> sampling.Samples:
        return sampling.sample(
            model,
            prompts,
            max_new_tokens=15,
            temperature=0.8,
            eos_token_ids=[3, 5, 12],
            pad_token_id=0,
            seed=9,
        )

    with_room = sampled()
    assert len(set(map(len, with_room.responses))) > 1, "rows leave the batch"
    monkeypatch.setattr(sampling, "make_room", lambda cache, rows, most: cache.batch_select_indices(rows))
    assert with_room == sampled()


def test_layers_of_a_sliding_window_stay_what_they_are() -> None:
    model = mistral_with_a_window()
    cache = DynamicCache(config=model.config)
    model(torch.tensor([[1, 2, 3]]), past_key_values=cache, use_cache=True)
    kinds = [type(layer) for layer in cache.layers]
    make_room(cache, torch.tensor([0, 0]), most=5)
    assert [type(layer) for layer in cache.layers] == kinds
    assert cache.layers[0].keys.shape[0] == 2
