"""Guards fire on hand-worked curves exactly where their bounds are exceeded."""

import math

import pytest

from vantage.algorithms.guards import is_outside


@pytest.mark.parametrize(
    ("values", "relation", "amount", "over", "expected"),
    [
        ([1, 1, 5, 5, 5], "above", 4, 3, True),
        ([1, 1, 5, 4, 5], "above", 4, 3, False),  # 4 is not above 4
        ([5, 5], "above", 4, 3, False),  # two reports of three
        ([9, 9, 9, 1], "above", 4, 1, False),  # the newest is within
        ([-1, -2], "below", 0, 2, True),
        ([-1, 0], "below", 0, 2, False),
        ([1, 3, 5, 7], "rises_by", 3.9, 2, True),  # 6 − 2 = 4
        ([1, 3, 5, 7], "rises_by", 4, 2, False),
        ([9, 1, 3, 5, 7], "rises_by", 3.9, 2, True),  # older reports do not count
        ([3, 5, 7], "rises_by", 0.1, 2, False),  # three reports of four
        ([7, 5, 3, 1], "falls_by", 3.9, 2, True),
        ([7, 5, 3, 1], "rises_by", 0.1, 2, False),
        ([math.nan, 5, 5], "above", 4, 3, False),
        ([1, math.nan, 9, 9], "rises_by", 1, 2, False),
    ],
)
def test_a_bound_by_hand(
    values: list[float], relation: str, amount: float, over: int, expected: bool
) -> None:
    assert is_outside(values, relation, amount, over=over) is expected  # type: ignore[arg-type]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_share_is_of_the_size_of_the_earlier_mean(sign: int) -> None:
    """A rise by 1 from 2 or −2 is half of the earlier mean's size, whatever its sign."""
    values = [2.0 * sign, 2.0 * sign + 1.0]
    assert is_outside(values, "rises_by", 0.49, over=1, is_relative=True)
    assert not is_outside(values, "rises_by", 0.5, over=1, is_relative=True)
    assert not is_outside(values, "falls_by", 0.01, over=1, is_relative=True)


def test_a_guard_looks_at_one_value_or_more() -> None:
    with pytest.raises(ValueError, match="over=0; a guard looks at one value or more"):
        is_outside([1.0], "above", 0.0, over=0)
