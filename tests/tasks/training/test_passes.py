"""Passes: rows of like length together, each once, as many on every rank, with the fewest positions."""

import random
from itertools import combinations

import pytest
import torch

from tasks.training import ranks
from tasks.training.passes import Pass, cut, passes


def cost_of(lengths: list[int], ends: tuple[int, ...], overhead: int) -> int:
    """Of passes over rows, the longest first, that end there: written out from its definition."""
    starts = (0, *ends[:-1])
    return sum(
        overhead + (end - start) * max(lengths[start:end]) for start, end in zip(starts, ends, strict=True)
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("size", [None, 3])
def test_no_other_cut_costs_less(seed: int, size: int | None) -> None:
    """All cuts of nine rows, 256 of them, tried one by one."""
    draw = random.Random(seed)
    lengths = sorted((draw.randint(1, 40) for _ in range(9)), reverse=True)
    overhead = draw.choice([1, 8, 30])
    every = [
        (*inner, len(lengths))
        for count in range(len(lengths))
        for inner in combinations(range(1, len(lengths)), count)
    ]
    if size is not None:
        every = [
            ends for ends in every if max(b - a for a, b in zip((0, *ends[:-1]), ends, strict=True)) <= size
        ]
    found = tuple(part.stop for part in cut(lengths, size=size, overhead=overhead))
    assert found in every
    assert cost_of(lengths, found, overhead) == min(cost_of(lengths, ends, overhead) for ends in every)


def test_rows_of_one_length_are_as_few_passes_as_may_be_in_their_order() -> None:
    assert [part.rows for part in passes([7] * 10, 4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [part.rows for part in passes([7] * 10, None)] == [list(range(10))]
    assert [part.done for part in passes([7] * 10, 4)] == [0, 4, 8]


def test_the_longest_come_first_and_share_a_pass() -> None:
    """Four of 100 tokens and four of 10: one pass would compute 800 positions, two compute 440."""
    lengths = [10, 100, 10, 100, 10, 100, 10, 100]
    assert [part.rows for part in passes(lengths, None)] == [[1, 3, 5, 7], [0, 2, 4, 6]]


@pytest.mark.parametrize("seed", range(5))
def test_ragged_rows_are_padded_by_little(seed: int) -> None:
    """64 rows of 40 to 160 tokens, of which one pass would compute more than a third for nothing."""
    draw = random.Random(seed)
    lengths = [32 + draw.randint(8, 128) for _ in range(64)]
    positions = sum(len(part.rows) * max(lengths[row] for row in part.rows) for part in passes(lengths, None))
    assert 1 - sum(lengths) / (64 * max(lengths)) > 0.3
    assert 1 - sum(lengths) / positions <= 0.05


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [None, 1, 2])
@pytest.mark.parametrize("count", [1, 4, 11])
def test_every_row_is_of_one_rank_and_all_make_as_many_passes(
    world_size: int, size: int | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [7, 3, 12, 1, 5, 5, 9, 2, 12, 4, 6][:count]
    monkeypatch.setattr(ranks, "world_size", lambda: world_size)
    numbers, found = set(), []
    for rank in range(world_size):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        mine = list(passes(lengths, size))
        numbers.add(len(mine))
        assert all(size is None or len(part.rows) <= size for part in mine)
        found += [row for part in mine if part.weight for row in part.rows]
    assert len(numbers) == 1
    assert sorted(found) == list(range(count))


def test_what_is_found_goes_into_its_rows() -> None:
    into = torch.zeros(4, 3)
    Pass([1, 3]).put(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), into=into)
    Pass([0], weight=0.0).put(torch.tensor([[9.0]]), into=into)
    assert into.tolist() == [[0, 0, 0], [1, 2, 0], [0, 0, 0], [3, 4, 0]]
    of_rows = torch.zeros(4, dtype=torch.float64)
    Pass([2, 0]).put(torch.tensor([5.0, 6.0]), into=of_rows)
    assert of_rows.tolist() == [6, 0, 5, 0]


def test_a_pass_that_keeps_step_changes_nothing_of_what_was_found() -> None:
    """Its row is another pass's too: what is there stays."""
    into = torch.ones(2, 1)
    Pass([0], weight=0.0).put(torch.zeros(1, 1), into=into)
    assert into.tolist() == [[1], [1]]
