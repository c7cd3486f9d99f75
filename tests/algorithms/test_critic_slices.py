"""The measures of each slice equal those of a loop over single tokens."""

import math
from collections import defaultdict

import numpy as np
import pytest
import torch

from vantage.algorithms.critic_slices import by_difficulty, by_length, by_part, by_tokens_left, parts_by_rank


def random_batch(seed: int, rows: int = 24, width: int = 21):
    """Return ragged rows of 5 prompts, NaN behind their ends; the returns fall along each response."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, width + 1, size=rows)
    mask = np.arange(width) < lengths[:, None]
    values, returns = (np.where(mask, rng.normal(size=(rows, width)), math.nan) for _ in range(2))
    prompts = rng.integers(0, 5, size=rows) * 7 - 3
    return torch.tensor(values), torch.tensor(returns), torch.tensor(mask), torch.tensor(prompts)


def tokens(batch):
    """Yield (row, place, length, value, return) of each valid token."""
    values, returns, mask, _ = batch
    for row in range(len(mask)):
        length = int(mask[row].sum())
        for place in range(length):
            yield row, place, length, values[row, place].item(), returns[row, place].item()


def of_bins(batch, bin_of):
    """Return bin → its tokens as (row, value, return)."""
    found = defaultdict(list)
    for row, place, length, value, target in tokens(batch):
        found[bin_of(row, place, length)].append((row, value, target))
    return found


def doubling(count):
    low = 2 ** int(math.log2(count))
    return "1" if low == 1 else f"{low}-{2 * low - 1}"


def third_of(batch):
    """Return the third by the mean return of the other responses to the prompt; tied ones are where the middle of their
    ranks is.
    """
    _, returns, _, prompts = batch
    others = {}
    for row, prompt in enumerate(prompts.tolist()):
        rows = [each for each in range(len(prompts)) if prompts[each] == prompt and each != row]
        if rows:
            others[row] = sum(returns[each, 0].item() for each in rows) / len(rows)

    def third(row, *_):
        if row not in others:
            return None
        below = sum(each < others[row] - 1e-12 for each in others.values())
        tied = sum(abs(each - others[row]) <= 1e-12 for each in others.values())
        return ["hardest", "middle", "easiest"][int(3 * (below + tied / 2) / len(others))]

    return third


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("slices", "bin_of"),
    [
        (
            by_part,
            lambda row, place, length: str(1 + 10 * place // length),
        ),
        (by_tokens_left, lambda row, place, length: doubling(length - place)),
        (by_length, lambda row, place, length: doubling(length)),
        (by_difficulty, None),
    ],
    ids=["part", "tokens left", "length", "difficulty"],
)
def test_a_slice_is_what_a_loop_over_its_tokens_says(slices, bin_of, seed):
    batch = random_batch(seed)
    expected = of_bins(batch, bin_of or third_of(batch))
    expected.pop(None, None)
    found = slices(*batch)
    assert {each.label for each in found} == set(expected)
    assert sum(each.num_tokens for each in found) == sum(map(len, expected.values()))
    for each in found:
        rows, values, targets = (np.array(part) for part in zip(*expected[each.label], strict=True))
        error = targets - values
        assert each.num_tokens == len(values)
        assert each.num_responses == len(set(rows))
        assert each.bias.value == pytest.approx(-error.mean())
        explained = 1 - error.var() / targets.var() if len(targets) > 1 else math.nan
        assert each.explained_variance.value == pytest.approx(explained, nan_ok=True)
        assert each.explained_variance.num_clusters == len({int(batch[3][row]) for row in rows})


def test_a_critic_that_sees_only_the_end_is_found_out():
    """The critic predicts the return in the last two tokens, and the mean before."""
    returns = torch.tensor([[1.0] * 8, [-1.0] * 8] * 3)
    values = torch.where(torch.arange(8) >= 6, returns, torch.zeros(8))
    mask, prompts = torch.ones(6, 8).bool(), torch.arange(6)
    explained = {
        each.label: each.explained_variance.value for each in by_tokens_left(values, returns, mask, prompts)
    }
    assert explained == {"1": 1.0, "2-3": 0.5, "4-7": 0.0, "8-15": 0.0}


@pytest.mark.parametrize("slices", [by_part, by_tokens_left, by_length, by_difficulty])
def test_an_empty_mask_and_other_shapes_are_refused(slices):
    ones = torch.ones(2, 3)
    with pytest.raises(ValueError, match="has no True element"):
        slices(ones, ones, torch.zeros(2, 3).bool(), torch.arange(2))
    with pytest.raises(ValueError, match="values"):
        slices(torch.ones(2, 4), ones, ones.bool(), torch.arange(2))


@pytest.mark.parametrize("slices", [by_part, by_tokens_left, by_length, by_difficulty])
def test_neither_the_order_of_rows_nor_padding_changes_a_number(slices):
    values, returns, mask, prompts = random_batch(7)
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(1))
    wider = [torch.nn.functional.pad(each, (0, 4), value=math.inf) for each in (values, returns)]
    changed = slices(*(each[order] for each in (*wider, torch.nn.functional.pad(mask, (0, 4)), prompts)))
    for one, other in zip(slices(values, returns, mask, prompts), changed, strict=True):
        assert (one.label, one.num_tokens, one.num_responses) == (
            other.label,
            other.num_tokens,
            other.num_responses,
        )
        for a, b in ((one.explained_variance, other.explained_variance), (one.bias, other.bias)):
            assert (a.value, a.standard_error) == pytest.approx(
                (b.value, b.standard_error), rel=1e-12, nan_ok=True
            )


def test_long_responses_share_the_last_bin():
    width = 65_537
    mask = torch.ones(2, width, dtype=torch.bool)
    mask[1, 65_535:] = False
    ones = torch.ones(2, width)
    assert [each.label for each in by_length(ones, ones, mask, torch.arange(2))] == ["32768-65535", "65536+"]
    last = by_tokens_left(ones, ones, mask, torch.arange(2))[-1]
    assert (last.label, last.num_tokens) == ("65536+", 2)


def test_difficulty_is_that_of_the_other_responses():
    # Prompt 0 got 0, 0, 1 and prompt 1 got 1, 1, 0: the others of a lucky response to prompt 0 got 0, those of an unlucky
    # one to prompt 1 got 1, and all the rest have a half
    returns = torch.tensor([[0.0], [0.0], [1.0], [1.0], [1.0], [0.0]])
    values, mask = torch.full((6, 1), 0.5), torch.ones(6, 1).bool()
    prompts = torch.tensor([0, 0, 0, 1, 1, 1])
    found = {each.label: each for each in by_difficulty(values, returns, mask, prompts)}
    assert {label: each.num_responses for label, each in found.items()} == {
        "hardest": 1,
        "middle": 4,
        "easiest": 1,
    }
    assert found["hardest"].bias.value == -0.5  # its own return was 1
    assert by_difficulty(values, returns, mask, torch.arange(6)) == []


def test_parts_by_rank_by_hand():
    assert parts_by_rank(torch.tensor([3.0, 1.0, 2.0, 4.0]), 2).tolist() == [1, 0, 0, 1]
    assert parts_by_rank(torch.zeros(5), 3).tolist() == [1] * 5
    # ranks 0 to 2 tied: their middle, 1.5 of 4, is in the first half
    assert parts_by_rank(torch.tensor([0.0, 0.0, 0.0, 1.0]), 2).tolist() == [0, 0, 0, 1]
