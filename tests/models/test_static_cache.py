"""A cache at fixed addresses gives what plain indexing gives."""

import pytest
import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from vantage.models.one_token import grouped_attention
from vantage.models.static_cache import Bucket, FixedLayer, StaticCache, length_for, tensors_of


def tensors(held: StaticCache) -> list[torch.Tensor]:
    """Return keys and values, layer by layer."""
    found = []
    for layer in held.layers().layers:
        assert isinstance(layer, FixedLayer)
        assert layer.keys is not None
        assert layer.values is not None
        found += [layer.keys, layer.values]
    return found


def test_lengths_are_few_and_no_longer_than_a_quarter_more() -> None:
    lengths = [length_for(tokens, most=10**6) for tokens in range(1, 32_769)]
    assert all(length >= tokens for tokens, length in enumerate(lengths, start=1))
    assert all(length <= max(1.25 * tokens, tokens + 127) for tokens, length in enumerate(lengths, start=1))
    assert lengths == sorted(lengths)
    assert sorted(set(lengths))[:8] == [128, 256, 384, 512, 640, 768, 896, 1024]
    assert len(set(lengths)) == 28
    assert length_for(2100, most=10**6) == 2560
    assert length_for(2100, most=2150) == 2176, "and no longer than the last token needs, but for a multiple"


def test_rows_move_between_buckets_as_they_are() -> None:
    """The rows equal plain indexing, and columns behind the tokens are 0, whatever they held before."""
    torch.manual_seed(2)
    prompts = DynamicCache()
    for number in range(2):
        prompts.update(torch.randn(3, 2, 5, 4), torch.randn(3, 2, 5, 6), number)
    held = StaticCache(prompts, dtype=None)
    rows = torch.tensor([2, 0, 0, 1, 2, 1])
    expected = [(keys[rows], values[rows]) for keys, values in map(tensors_of, prompts.layers)]
    held.load(prompts, rows, Bucket(6, 9))
    first = tensors(held)[0].data_ptr()

    def check() -> None:
        pairs = [each for pair in expected for each in pair]
        for found, tokens in zip(tensors(held), pairs, strict=True):
            assert torch.equal(found[:, :, :5], tokens)
            assert not found[:, :, 5:].any()

    check()
    for kept, length in (([0, 2, 3, 5], 12), ([1, 0, 3], 8), ([2, 0, 0, 1], 30)):
        for each in tensors(held):
            each[:, :, 5:] = torch.nan
        bucket = Bucket(len(kept), length)
        fits = held.fits(bucket)
        assert fits == (length < 30)
        held.move(torch.tensor(kept), bucket, tokens=5)
        expected = [(keys[kept], values[kept]) for keys, values in expected]
        check()
        if fits:
            assert tensors(held)[0].data_ptr() == first


def test_a_token_is_written_where_the_column_says() -> None:
    prompts = DynamicCache()
    prompts.update(torch.ones(2, 1, 3, 2), torch.ones(2, 1, 3, 2), 0)
    held = StaticCache(prompts, dtype=torch.bfloat16)
    held.load(prompts, torch.tensor([0, 1]), Bucket(2, 6))
    (layer,) = held.layers().layers
    assert isinstance(layer, FixedLayer)
    held.column.fill_(3)
    layer.update(torch.full((2, 1, 1, 2), 2.0), torch.full((2, 1, 1, 2), 3.0))
    keys, values = tensors(held)
    assert keys.dtype == torch.bfloat16
    assert keys[1, 0, :, 0].tolist() == [1, 1, 1, 2, 0, 0]
    assert values[0, 0, :, 1].tolist() == [1, 1, 1, 3, 0, 0]
    assert layer.get_mask_sizes(1) == (6, 0)
    with pytest.raises(ValueError, match="2 tokens at once"):
        layer.update(torch.ones(2, 1, 2, 2), torch.ones(2, 1, 2, 2))


def test_attention_of_one_token_refuses_what_it_does_not_compute() -> None:
    query, key = torch.zeros(1, 2, 1, 4), torch.zeros(1, 1, 3, 4)
    mask = torch.ones(1, 1, 1, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="no attention with more tokens, or without a mask"):
        grouped_attention(nn.Identity(), query, key, key, None)
    with pytest.raises(ValueError, match="no attention with more tokens"):
        grouped_attention(nn.Identity(), query.repeat(1, 1, 2, 1), key, key, mask)
    with pytest.raises(ValueError, match="no attention with softcap"):
        grouped_attention(nn.Identity(), query, key, key, mask, softcap=30.0)


def test_attention_of_one_token_is_a_softmax_over_what_the_mask_shows() -> None:
    """The test writes attention out head by head; two heads share keys and values, and the scale is not that of their
    width.
    """
    draw = torch.Generator().manual_seed(4)
    query = torch.randn(3, 4, 1, 6, generator=draw, dtype=torch.float64)
    keys, values = torch.randn(2, 3, 2, 5, 6, generator=draw, dtype=torch.float64)
    shown = [[0, 1, 2], [2, 3], [4]]
    mask = torch.zeros(3, 1, 1, 5, dtype=torch.bool)
    for row, columns in enumerate(shown):
        mask[row, 0, 0, columns] = True
    found, _ = grouped_attention(nn.Identity(), query, keys, values, mask, scaling=0.3)
    assert found.shape == (3, 1, 4, 6)
    for row, columns in enumerate(shown):
        for head in range(4):
            weights = (0.3 * keys[row, head // 2, columns] @ query[row, head, 0]).softmax(dim=0)
            expected = weights @ values[row, head // 2, columns]
            torch.testing.assert_close(found[row, 0, head], expected)
