"""Sharded weights stay gathered while responses are sampled, if as much memory again is free."""

import pytest

from vantage.models.gathered_weights import suffices


@pytest.mark.parametrize(
    ("num_bytes", "beside", "free", "fits"),
    [
        (15, 10, 34, True),  # 15 + 15 of 30.6 that may be used
        (15, 10, 33, False),  # 29.7
        (15, 40, 62, True),  # 15 + 40 of 55.8
        (15, 40, 61, False),  # 54.9
    ],
)
def test_gathered_weights_are_kept_where_as_much_again_is_free(
    num_bytes: int, beside: int, free: int, fits: bool
) -> None:
    assert suffices(num_bytes, beside, free) == fits
