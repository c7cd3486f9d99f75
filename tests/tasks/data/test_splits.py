"""The prompt alone decides the side: no prompt is on two sides, and each is on the same side in every dataset."""

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vantage.schemas.recipe.inputs import Shares, Split
from vantage.tasks.data.splits import (
    TooFewRows,
    prompt_position,
    side_of,
    split_alone,
    split_by_shares,
)

PROMPTS = [f"What is {n} plus {n}?" for n in range(1000)]


def positions_of(prompts: list[str]) -> list[float]:
    return [prompt_position(prompt) for prompt in prompts]


def sides_of(prompts: list[str], split: Split) -> list[str | None]:
    return list(split_alone(positions_of(prompts), split, Shares()))


def test_numbers_of_rows_are_reached_exactly_where_prompts_are_all_different() -> None:
    sides = sides_of(PROMPTS, Split(validation=30, test=70))
    assert (sides.count("test"), sides.count("validation"), sides.count("train")) == (70, 30, 900)


def test_shares_come_out_close_to_what_was_asked() -> None:
    sides = sides_of(PROMPTS, Split(validation=0.1, test=0.2))
    # Binomial with n = 1000: four standard deviations are 38 rows at 0.1 and 51 at 0.2.
    assert abs(sides.count("validation") - 100) < 38
    assert abs(sides.count("test") - 200) < 51


def test_a_share_puts_a_prompt_on_the_same_side_of_another_dataset() -> None:
    split = Split(validation=0.1, test=0.1)
    whole = dict(zip(PROMPTS, sides_of(PROMPTS, split), strict=True))
    part = PROMPTS[::3]
    assert sides_of(part, split) == [whole[prompt] for prompt in part]


@given(st.lists(st.sampled_from(["a", "A ", "b", "  b", "c", "d", "e", "f", "g", "h"]), min_size=30))
def test_prompts_alike_but_for_case_and_space_never_stand_on_two_sides(prompts: list[str]) -> None:
    try:
        sides = sides_of(prompts, Split(validation=2, test=2))
    except TooFewRows:
        return
    seen: dict[str, str] = {}
    for prompt, side in zip(prompts, sides, strict=True):
        assert seen.setdefault(prompt.strip().lower(), side) == side


# By hand: the positions in order are .1 .1 .2 .3 .3 .3 .6 .9
@pytest.mark.parametrize(
    ("test", "validation", "expected"),
    [
        (1, 1, "ttvrrrrr"),  # the one row that was asked for comes with the rows of the same prompt
        (3, 2, "tttvvvrr"),
        (2, 5, "ttvvvvvr"),
        (2, 0.25, "ttvvvvrr"),  # [.2, .45)
        (0.15, 2, "ttvvvvrr"),
        (0.4, 0.3, "ttttttvr"),
    ],
)
def test_whole_prompts_are_taken_in_the_order_of_their_positions(
    test: int | float, validation: int | float, expected: str
) -> None:
    positions = [0.3, 0.1, 0.9, 0.3, 0.2, 0.6, 0.1, 0.3]
    sides = split_alone(positions, Split(test=test, validation=validation), Shares())
    letter = {"test": "t", "validation": "v", "train": "r"}
    assert "".join(letter[side] for _, side in sorted(zip(positions, sides, strict=True))) == expected


@pytest.mark.parametrize("assign", [split_alone, split_by_shares])
def test_the_order_of_rows_changes_nothing(assign: Any) -> None:
    split, shares = Split(validation=50, test=50), Shares(validation=0.1, test=0.1)
    forward = dict(zip(PROMPTS, assign(positions_of(PROMPTS), split, shares), strict=True))
    backward = dict(zip(PROMPTS[::-1], assign(positions_of(PROMPTS[::-1]), split, shares), strict=True))
    assert forward == backward


SHARES = Shares(validation=0.1, test=0.2)
SIZES = st.one_of(st.none(), st.integers(1, 20))


@pytest.mark.slow
@given(
    st.data(), st.builds(Split, validation=SIZES, test=SIZES), st.builds(Split, validation=SIZES, test=SIZES)
)
def test_no_dataset_trains_on_a_prompt_that_another_holds_out(data: Any, ours: Split, theirs: Split) -> None:
    """A hash of the prompt and the shares decide, whatever splits and prompts each dataset has."""
    sides: dict[str, set[str | None]] = {}
    for split in (ours, theirs):
        some = data.draw(st.sets(st.sampled_from(PROMPTS), min_size=400))
        for prompt, side in zip(
            sorted(some), split_by_shares(positions_of(sorted(some)), split, SHARES), strict=True
        ):
            sides.setdefault(prompt, set()).add(side)
    assert all(len(found - {None}) == 1 or found == {None} for found in sides.values())
    assert all(None not in found or "train" not in found for found in sides.values())


def test_a_side_follows_from_the_position_alone() -> None:
    # sha256("What is 0 plus 0?" in lower case), its first 8 bytes over 2^64
    digest = hashlib.sha256(b"what is 0 plus 0?").hexdigest()
    position = int(digest[:16], 16) / 16**16
    shares = Shares(validation=0.3, test=0.3)
    expected = "test" if position < 0.3 else "validation" if position < 0.6 else "train"
    assert side_of("What  is 0 PLUS 0?", shares) == expected
    assert split_by_shares(positions_of(PROMPTS), Split(), shares) == [
        side_of(prompt, shares) for prompt in PROMPTS
    ]


def test_a_number_is_taken_from_the_share_and_the_rest_of_the_share_is_not_used() -> None:
    whole = split_by_shares(positions_of(PROMPTS), Split(), SHARES)
    some = split_by_shares(positions_of(PROMPTS), Split(validation=30, test=70), SHARES)
    assert (some.count("test"), some.count("validation")) == (70, 30)
    assert some.count("train") == whole.count("train")
    assert all(part in (side, None) for part, side in zip(some, whole, strict=True))


def test_more_rows_than_the_share_holds_are_refused() -> None:
    with pytest.raises(
        TooFewRows, match=r"split.test=500 is more than the \d+ rows of 1000 that the test share of 0.2"
    ):
        split_by_shares(positions_of(PROMPTS), Split(test=500), SHARES)


def test_positions_are_spread_over_the_whole_unit_interval() -> None:
    positions = sorted(map(prompt_position, PROMPTS))
    assert positions[0] < 0.01 < 0.99 < positions[-1] < 1.0


def test_a_side_without_rows_is_refused() -> None:
    with pytest.raises(TooFewRows, match=r"split.train=the rest leaves no row for train: there are 3 rows"):
        sides_of(["a", "b", "c"], Split(validation=1, test=2))
    with pytest.raises(TooFewRows, match="4 rows with 1 different prompts"):
        sides_of(["same"] * 4, Split(validation=1, test=1))
