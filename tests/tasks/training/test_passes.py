"""Passes hold rows of like length, each once, as many on every rank, with the fewest positions."""

import random
from itertools import combinations

import pytest
import torch

from vantage.schemas.recipe.pass_limits import UNLIMITED, PassLimits
from vantage.tasks.training import progress, ranks
from vantage.tasks.training.cuts import OVERHEAD, cut
from vantage.tasks.training.passes import Pass, packed_passes, passes


def cost_of(lengths: list[int], ends: tuple[int, ...], overhead: int) -> int:
    """Return, from its definition, the cost of passes that end at these rows, where the longest row is the first."""
    starts = (0, *ends[:-1])
    return sum(
        overhead + (end - start) * max(lengths[start:end]) for start, end in zip(starts, ends, strict=True)
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    "limits",
    [
        UNLIMITED,
        PassLimits(rows=3),
        PassLimits(tokens=60),
        PassLimits(rows=3, tokens=60),
        PassLimits(rows=2, tokens=200),
        PassLimits(tokens=10),
    ],
)
@pytest.mark.parametrize("sequences", [1, 2, (1, 3, 2, 1, 1, 4, 2, 1, 2)])
def test_no_other_cut_costs_less(seed: int, limits: PassLimits, sequences: int | tuple[int, ...]) -> None:
    """The test tries all 256 cuts of nine rows. A pass of a single row may exceed the limits."""
    draw = random.Random(seed)
    lengths = sorted((draw.randint(1, 40) for _ in range(9)), reverse=True)
    sizes = (sequences,) * 9 if isinstance(sequences, int) else sequences
    overhead = draw.choice([1, 8, 30])

    def fits(start: int, end: int) -> bool:
        positions = sum(sizes[start:end]) * max(lengths[start:end])
        within = positions <= (limits.tokens or positions) and end - start <= (limits.rows or end)
        return within or end - start == 1

    every = [
        (*inner, len(lengths))
        for count in range(len(lengths))
        for inner in combinations(range(1, len(lengths)), count)
    ]
    every = [ends for ends in every if all(map(fits, (0, *ends[:-1]), ends))]
    found = tuple(part.stop for part in cut(lengths, limits=limits, overhead=overhead, sequences=sequences))
    assert found in every
    assert cost_of(lengths, found, overhead) == min(cost_of(lengths, ends, overhead) for ends in every)


def test_a_pass_of_pairs_has_twice_the_positions() -> None:
    """Four rows of 10 tokens are 40 positions, and 80 where each is a pair."""
    limits = PassLimits(tokens=40)
    assert [part.rows for part in passes([10] * 4, limits)] == [[0, 1, 2, 3]]
    assert [part.rows for part in passes([10] * 4, PassLimits(tokens=39))] == [[0, 1, 2], [3]]
    assert [part.rows for part in passes([10] * 4, limits, sequences=2)] == [[0, 1], [2, 3]]
    assert [part.rows for part in passes([10] * 4, limits, sequences=[3, 1, 2, 2])] == [[0, 1], [2, 3]]


def test_a_row_longer_than_the_budget_is_a_pass_by_itself() -> None:
    lengths = [3, 50, 4, 60, 3]
    assert [part.rows for part in passes(lengths, PassLimits(tokens=12))] == [[3], [1], [0, 2, 4]]


def test_progress_tells_of_rows_and_positions_before_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest pass is reported again after the last, since memory may run out in the optimiser's step."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(progress, "computing", lambda rows, tokens: told.append((rows, tokens)))
    monkeypatch.setitem(OVERHEAD, "cpu", 3)
    assert [part.rows for part in passes([10, 9, 2, 2, 2], UNLIMITED, sequences=2)] == [[0, 1], [2, 3, 4]]
    assert told == [(2, 40), (3, 12), (2, 40)]
    told.clear()
    assert [part.layout for part in packed_passes([10, 6, 3], UNLIMITED)] == [[[0], [1, 2]]]
    assert told == [(3, 20), (3, 20)]


def test_rows_of_one_length_are_as_few_passes_as_may_be_in_their_order() -> None:
    assert [part.rows for part in passes([7] * 10, PassLimits(4))] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [part.rows for part in passes([7] * 10, UNLIMITED)] == [list(range(10))]
    assert [part.done for part in passes([7] * 10, PassLimits(4))] == [0, 4, 8]
    assert list(passes([], PassLimits(4))) == []


def test_the_longest_come_first_and_share_a_pass() -> None:
    """With four rows of 100 tokens and four of 10, one pass would compute 800 positions, and two compute 440."""
    lengths = [10, 100, 10, 100, 10, 100, 10, 100]
    assert [part.rows for part in passes(lengths, UNLIMITED)] == [[1, 3, 5, 7], [0, 2, 4, 6]]


@pytest.mark.parametrize("seed", range(5))
def test_ragged_rows_are_padded_by_little(seed: int) -> None:
    """64 rows of 40 to 160 tokens, of which one pass would compute more than a third for nothing."""
    draw = random.Random(seed)
    lengths = [32 + draw.randint(8, 128) for _ in range(64)]
    positions = sum(
        len(part.rows) * max(lengths[row] for row in part.rows) for part in passes(lengths, UNLIMITED)
    )
    assert 1 - sum(lengths) / (64 * max(lengths)) > 0.3
    assert 1 - sum(lengths) / positions <= 0.05


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "limits", [UNLIMITED, PassLimits(1), PassLimits(2), PassLimits(tokens=15), PassLimits(3, 24)]
)
@pytest.mark.parametrize("count", [1, 4, 11])
def test_every_row_is_of_one_rank_and_all_make_as_many_passes(
    world_size: int, limits: PassLimits, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [7, 3, 12, 1, 5, 5, 9, 2, 12, 4, 6][:count]
    monkeypatch.setattr(ranks, "world_size", lambda: world_size)
    numbers, found = set(), []
    for rank in range(world_size):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        mine = list(passes(lengths, limits))
        numbers.add(len(mine))
        for part in mine:
            positions = len(part.rows) * max(lengths[row] for row in part.rows)
            assert len(part.rows) <= (limits.rows or count)
            assert positions <= (limits.tokens or positions) or len(part.rows) == 1
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
    """The row of such a pass is in another pass too, whose result stays."""
    into = torch.ones(2, 1)
    Pass([0], weight=0.0).put(torch.zeros(1, 1), into=into)
    assert into.tolist() == [[1], [1]]
