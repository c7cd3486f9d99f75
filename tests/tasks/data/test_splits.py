"""Sides are decided by prompt alone: no prompt on two sides, the same side in every dataset."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.recipe import Split
from tasks.data.splits import TooFewRows, assign_splits, prompt_position

PROMPTS = [f"What is {n} plus {n}?" for n in range(1000)]


def test_numbers_of_rows_are_reached_exactly_where_prompts_are_all_different() -> None:
    sides = assign_splits(PROMPTS, Split(validation=30, test=70))
    assert (sides.count("test"), sides.count("validation"), sides.count("train")) == (70, 30, 900)


def test_shares_come_out_close_to_what_was_asked() -> None:
    sides = assign_splits(PROMPTS, Split(validation=0.1, test=0.2))
    # Binomial with n = 1000: four standard deviations are 38 rows at 0.1 and 51 at 0.2.
    assert abs(sides.count("validation") - 100) < 38
    assert abs(sides.count("test") - 200) < 51


def test_a_share_puts_a_prompt_on_the_same_side_of_another_dataset() -> None:
    split = Split(validation=0.1, test=0.1)
    whole = dict(zip(PROMPTS, assign_splits(PROMPTS, split), strict=True))
    part = PROMPTS[::3]
    assert assign_splits(part, split) == [whole[prompt] for prompt in part]


@given(st.lists(st.sampled_from(["a", "A ", "b", "  b", "c", "d", "e", "f", "g", "h"]), min_size=30))
def test_prompts_alike_but_for_case_and_space_never_stand_on_two_sides(prompts: list[str]) -> None:
    try:
        sides = assign_splits(prompts, Split(validation=2, test=2))
    except TooFewRows:
        return
    seen: dict[str, str] = {}
    for prompt, side in zip(prompts, sides, strict=True):
        assert seen.setdefault(prompt.strip().lower(), side) == side


def test_the_order_of_rows_changes_nothing() -> None:
    split = Split(validation=50, test=50)
    forward = dict(zip(PROMPTS, assign_splits(PROMPTS, split), strict=True))
    backward = dict(zip(PROMPTS[::-1], assign_splits(PROMPTS[::-1], split), strict=True))
    assert forward == backward


def test_positions_are_spread_over_the_whole_unit_interval() -> None:
    positions = sorted(map(prompt_position, PROMPTS))
    assert positions[0] < 0.01 < 0.99 < positions[-1] < 1.0


def test_a_side_without_rows_is_refused() -> None:
    with pytest.raises(TooFewRows, match=r"split.train=the rest leaves no row for train: there are 3 rows"):
        assign_splits(["a", "b", "c"], Split(validation=1, test=2))
    with pytest.raises(TooFewRows, match="4 rows with 1 different prompts"):
        assign_splits(["same"] * 4, Split(validation=1, test=1))
