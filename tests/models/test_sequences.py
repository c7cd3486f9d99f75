from dataclasses import replace

import pytest
import torch

from vantage.models.sequences import Sequences, collate, join

PAD = 0


@pytest.fixture
def sequences() -> Sequences:
    # the padding id stands in the first prompt and ends the second response, as where padding is EOS
    return collate([[5, PAD, 7], [8], [9, 4]], [[1, 2], [3, 4, 6, PAD], []], pad_token_id=PAD)


def test_prompts_and_responses_are_joined_and_padded_on_the_right(sequences: Sequences) -> None:
    assert sequences.input_ids.tolist() == [[5, 0, 7, 1, 2], [8, 3, 4, 6, 0], [9, 4, 0, 0, 0]]
    assert sequences.response_ids.tolist() == [[1, 2, 0, 0], [3, 4, 6, 0], [0, 0, 0, 0]]
    assert sequences.prompt_lengths.tolist() == [3, 1, 2]
    assert len(sequences) == 3


def test_masks_come_from_lengths_also_where_padding_is_a_token_of_the_text(sequences: Sequences) -> None:
    assert sequences.attention_mask.int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert sequences.response_mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    assert sequences.attention_mask.dtype == sequences.response_mask.dtype == torch.bool
    assert sequences.lengths.tolist() == [2, 4, 0]


def test_a_response_token_was_chosen_at_the_position_before_it(sequences: Sequences) -> None:
    # row 0: the prompt's last position is 2, which chose token 0; position 3 chose token 1
    assert sequences.response_positions[0, :2].tolist() == [2, 3]
    assert sequences.response_positions[1].tolist() == [0, 1, 2, 3]
    assert int(sequences.response_positions.max()) <= 4
    rows, steps = sequences.response_mask.nonzero(as_tuple=True)
    following = sequences.input_ids[rows, sequences.response_positions[rows, steps] + 1]
    assert following.tolist() == sequences.response_ids[rows, steps].tolist()


@pytest.mark.parametrize("indices", [[2, 0], torch.tensor([2, 0])])
def test_selecting_rows_keeps_their_order_and_trims_the_padding(
    sequences: Sequences, indices: list[int] | torch.Tensor
) -> None:
    selected = sequences.select(indices)
    expected = collate([[9, 4], [5, PAD, 7]], [[], [1, 2]], pad_token_id=PAD)
    for name in ("input_ids", "attention_mask", "response_ids", "response_mask", "prompt_lengths"):
        assert torch.equal(getattr(selected, name), getattr(expected, name)), name


def test_rows_can_be_repeated_or_sliced(sequences: Sequences) -> None:
    assert sequences.select([0, 0]).input_ids.tolist() == [[5, 0, 7, 1, 2]] * 2
    assert sequences.select(slice(2, None)).input_ids.tolist() == [[9, 4]]
    assert len(sequences.select([])) == 0


def test_of_a_response_stretches_may_be_learnt_alone(sequences: Sequences) -> None:
    assert sequences.learnt is sequences.response_mask
    whole = collate([[5], [6]], [[1, 2, 3, 4], [7, 8]], pad_token_id=PAD, learnt=[[(0, 1), (3, 4)], [(0, 2)]])
    assert whole.learnt.int().tolist() == [[1, 0, 0, 1], [1, 1, 0, 0]]
    assert whole.response_mask.int().tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert whole.select([1]).learnt.int().tolist() == [[1, 1]]


def test_it_moves_as_a_whole() -> None:
    moved = collate([[5]], [[1, 2]], pad_token_id=PAD, learnt=[[(0, 1)]]).to("meta")
    assert moved.layout is None, "which is that of one pass"
    devices = {
        value.device.type for name, value in vars(moved).items() if name not in ("layout", "given_lengths")
    }
    assert devices == {"meta"}


def test_only_empty_responses_make_a_batch_without_response_columns() -> None:
    sequences = collate([[1], [2]], [[], []], pad_token_id=PAD)
    assert sequences.response_mask.shape == sequences.response_positions.shape == (2, 0)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt of row 1 has no tokens"):
        collate([[1], []], [[2], [3]], pad_token_id=PAD)


def test_unequal_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 prompts and 1 responses"):
        collate([[1], [1]], [[2]], pad_token_id=PAD)


def test_joined_batches_keep_their_lengths_whatever_their_padding() -> None:
    """Each row comes without the padding of its own batch; a padding id in the text stays."""
    first = collate([[5, PAD, 7], [8]], [[1, 2], [3, 4, 6, PAD]], pad_token_id=PAD)
    second = collate([[9]], [[4]], pad_token_id=PAD)
    joined = join([second, first], pad_token_id=PAD)
    expected = collate([[9], [5, PAD, 7], [8]], [[4], [1, 2], [3, 4, 6, PAD]], pad_token_id=PAD)
    assert joined.loss_mask is expected.loss_mask is None
    assert joined.known == expected.known
    for name, tensor in vars(expected).items():
        if name not in ("given_lengths", "known"):
            assert tensor is None or torch.equal(getattr(joined, name), tensor), name
    with pytest.raises(ValueError, match="cannot be joined"):
        join([collate([[9]], [[4]], pad_token_id=PAD, learnt=[[(0, 1)]])], pad_token_id=PAD)


def test_what_is_known_of_the_rows_is_what_the_tensors_say() -> None:
    sequences = collate([[5, 6, 7], [5], [5, 6, 7]], [[1], [1, 2, 3], []], pad_token_id=PAD)
    for each in (
        sequences,
        sequences.select([2, 1, 1]),
        sequences.select(torch.tensor([1])),
        sequences.select(slice(1, 3)),
    ):
        read = replace(each, given_lengths=None).known
        assert each.known.prompts == read.prompts == each.prompt_lengths.tolist()
        assert each.known.responses == read.responses == each.response_mask.sum(dim=1).tolist()
        assert each.known.totals == each.attention_mask.sum(dim=1).tolist()
        assert each.first_equal_prompts() == replace(each, given_lengths=None).first_equal_prompts()
        for count in (None, 1):
            found = each.response_tokens(count)
            for ours, theirs in zip(found, each.response_mask[:count].nonzero(as_tuple=True), strict=True):
                assert torch.equal(ours, theirs)
    assert sequences.first_equal_prompts() == [0, 1, 0]
