"""Sequences are put side by side in rows where they fit together, and none sees another."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.tasks.test_model_families import FAMILIES
from vantage.models.folders import _attention_implementation
from vantage.models.logprobs import response_logprobs
from vantage.models.packing import boundaries_hold, first_fit_decreasing, pack
from vantage.models.scalar_head import read_scalars
from vantage.models.sequences import Packing, Sequences, collate

LENGTHS = some.lists(some.integers(1, 12), min_size=1, max_size=7)
PACKED = [name for name in FAMILIES if name != "bloom"]
IN_FLOAT32 = {"gemma", "gemma2", "gemma3"}
"""Families whose norms multiply by their weights in float32, whatever the model's type."""


@pytest.mark.parametrize(
    "lengths, capacity, rows",
    [
        # 9 alone; 7 with 2; 5 with 4; then nothing has room for 3, which gets a row with 2
        ([3, 5, 9, 2, 7, 4, 2], 9, [[2], [4, 3], [1, 5], [0, 6]]),
        ([4, 4, 4, 4], 8, [[0, 1], [2, 3]]),  # of equal lengths, the earlier comes first
        ([6], 6, [[0]]),
        ([], 5, []),
    ],
)
def test_the_longest_goes_first_into_the_first_row_that_has_room(
    lengths: list[int], capacity: int, rows: list[list[int]]
) -> None:
    assert first_fit_decreasing(lengths, capacity=capacity) == rows


def fewest_rows(lengths: Sequence[int], capacity: int) -> int:
    """Return the fewest rows by trying all orders, each filled row by row."""

    def filled(order: tuple[int, ...]) -> int:
        rows, room = 0, 0
        for length in order:
            if length > room:
                rows, room = rows + 1, capacity
            room -= length
        return rows

    return min(map(filled, set(permutations(lengths))))


@settings(max_examples=60)
@given(lengths=LENGTHS, more=some.integers(0, 6))
def test_every_sequence_is_in_one_row_and_rows_are_nearly_as_few_as_can_be(
    lengths: list[int], more: int
) -> None:
    capacity = max(lengths) + more
    rows = first_fit_decreasing(lengths, capacity=capacity)
    assert sorted(place for row in rows for place in row) == list(range(len(lengths)))
    assert all(sum(lengths[place] for place in row) <= capacity for row in rows)
    assert len(rows) <= 11 / 9 * fewest_rows(lengths, capacity) + 6 / 9


def test_a_sequence_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 6 tokens does not fit a row of 5"):
        first_fit_decreasing([3, 6], capacity=5)


def model_of(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    torch.manual_seed(3)
    config = FAMILIES[name]
    model = AutoModelForCausalLM.from_config(config, attn_implementation=_attention_implementation(config))
    return model.to(dtype).eval()


def batch_of(vocabulary: int, *, seed: int = 1) -> Sequences:
    """Return nine sequences of 3 to 45 tokens, longer than the sliding windows of the families, of which a part is
    learnt.
    """
    draw = random.Random(seed)
    prompts = [[draw.randrange(4, vocabulary) for _ in range(n)] for n in (25, 3, 9, 1, 1, 9, 25, 3, 9)]
    responses = [[draw.randrange(4, vocabulary) for _ in range(n)] for n in (20, 20, 2, 2, 1, 8, 1, 8, 20)]
    learnt = [[(0, 1 + len(response) // 2)] for response in responses]
    return collate(prompts, responses, pad_token_id=0, learnt=learnt)


def packed(sequences: Sequences) -> Sequences:
    totals = sequences.attention_mask.sum(dim=1).tolist()
    rows = first_fit_decreasing(totals, capacity=max(totals))
    assert max(map(len, rows)) >= 3 and len(rows) < len(totals) - 3
    return pack(sequences, rows)


def loss_and_gradient(model: PreTrainedModel, sequences: Sequences) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradient of the mean over all tokens that are learnt."""
    model.zero_grad()
    logprobs = response_logprobs(model, sequences, temperature=1.0).logprobs
    loss = -logprobs.masked_fill(~sequences.learnt, 0.0).sum() / sequences.learnt.sum()
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def one_by_one(model: PreTrainedModel, sequences: Sequences) -> tuple[float, dict[str, Tensor]]:
    """Return what transformers computes for each row by itself, without padding."""
    model.zero_grad()
    terms = []
    for row, (prompt, response) in enumerate(
        zip(sequences.prompt_rows(), sequences.response_rows(), strict=True)
    ):
        logits = model(torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        said = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        terms.append(said[sequences.learnt[row, : len(response)]])
    loss = -torch.cat(terms).mean()
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", PACKED)
def test_loss_and_gradient_are_those_of_each_sequence_alone(name: str) -> None:
    model = model_of(name)
    sequences = batch_of(FAMILIES[name].vocab_size)
    expected_loss, expected = one_by_one(model, sequences)
    loss, gradient = loss_and_gradient(model, packed(sequences))
    # transformers' own attention, without a kernel, has its softmax in float32
    is_float32_within = _attention_implementation(FAMILIES[name]) == "eager"
    assert loss == pytest.approx(expected_loss, abs=1e-7 if is_float32_within else 1e-10)
    assert gradient.keys() == expected.keys()
    for weight, found in gradient.items():
        in_float32 = is_float32_within or (name in IN_FLOAT32 and "norm" in weight)
        tolerance = 2e-6 if in_float32 else 1e-10
        torch.testing.assert_close(found, expected[weight], rtol=tolerance, atol=tolerance, msg=weight)


@pytest.mark.parametrize("name", [name for name in PACKED if name != "gemma2"])
def test_loss_and_gradient_are_those_of_the_padded_batch(name: str) -> None:
    """Gemma 2 is left out: its eager attention in float64 makes NaN of padding behind its window."""
    model = model_of(name)
    sequences = batch_of(FAMILIES[name].vocab_size, seed=2)
    expected_loss, expected = loss_and_gradient(model, sequences)
    loss, gradient = loss_and_gradient(model, packed(sequences))
    assert loss == pytest.approx(expected_loss, abs=1e-10)
    for weight, found in gradient.items():
        tolerance = 2e-6 if name in IN_FLOAT32 and "norm" in weight else 1e-10
        torch.testing.assert_close(found, expected[weight], rtol=tolerance, atol=tolerance, msg=weight)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_words_beside_a_sequence_change_no_bit_of_it(name: str, dtype: torch.dtype) -> None:
    """Any other sequence of the row may change, and the ids in the padding behind the last."""
    model = model_of(name, dtype)
    sequences = batch_of(FAMILIES[name].vocab_size)
    before = packed(sequences)
    assert isinstance(before.layout, Packing)
    found = response_logprobs(model, before, temperature=1.0).logprobs
    totals = sequences.attention_mask.sum(dim=1)
    for changed in range(len(sequences)):
        row, start = before.layout.rows[changed], before.layout.starts[changed]
        ids = before.layout.input_ids.clone()
        ids[row, start : start + totals[changed]] = 5
        ends = {
            int(r): int((before.layout.starts + totals)[before.layout.rows == r].max())
            for r in range(len(ids))
        }
        for other, end in ends.items():
            ids[other, end:] = 6
        after = replace(before, layout=replace(before.layout, input_ids=ids))
        again = response_logprobs(model, after, temperature=1.0).logprobs
        others = [place for place in range(len(sequences)) if place != changed]
        assert torch.equal(again[others], found[others])
        assert not torch.equal(again[changed], found[changed])


@torch.no_grad()
def test_values_are_read_where_a_sequence_stands_in_its_row() -> None:
    model, head = model_of("llama"), torch.nn.Linear(32, 1).double()
    sequences = batch_of(FAMILIES["llama"].vocab_size)
    found = response_logprobs(
        model, packed(sequences), temperature=1.0, value_head=head, with_final_values=True
    )
    assert found.values is not None and found.final_values is not None
    for row, (prompt, response) in enumerate(
        zip(sequences.prompt_rows(), sequences.response_rows(), strict=True)
    ):
        states = model.model(torch.tensor([prompt + response])).last_hidden_state[0]
        expected = read_scalars(states, head)
        torch.testing.assert_close(found.values[row, : len(response)], expected[len(prompt) - 1 : -1])
        torch.testing.assert_close(found.final_values[row], expected[-1])


@torch.no_grad()
def test_a_model_that_counts_positions_by_itself_mixes_them_up() -> None:
    """BLOOM takes ``position_ids`` without a word and reads the whole row; ``boundaries_hold`` sees it."""
    sequences = collate([[1], [1]], [[5, 6, 7], [8, 9, 10, 11]], pad_token_id=0)
    joined = collate([[1, 5, 6, 7, 1]], [[8, 9, 10, 11]], pad_token_id=0)
    held = {}
    for name in ("bloom", "llama", "gpt2"):
        model = model_of(name, torch.float32)

        def said(each: Sequences, row: int, model: Any = model) -> Tensor:
            return response_logprobs(model, each, temperature=1.0).logprobs[row]

        held[name] = boundaries_hold(
            alone=said(sequences, 1), packed=said(pack(sequences, [[0, 1]]), 1), joined=said(joined, 0)
        )
    assert held == {"bloom": False, "llama": True, "gpt2": True}


def test_a_selection_of_packed_sequences_has_a_row_each() -> None:
    sequences = batch_of(50)
    assert packed(sequences).select([1, 2]).layout is None
    assert packed(sequences).to("cpu").layout is None
