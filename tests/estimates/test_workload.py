"""A rank computes the right number of rows side by side."""

import pytest

from vantage.estimates.workload import Sampling, Sequences


@pytest.mark.parametrize(
    ("count", "world", "expected"),
    [(100.0, 1, 16.0), (100.0, 4, 16.0), (40.0, 4, 10.0), (10.0, 4, 2.5), (2.0, 4, 1.0)],
)
def test_each_rank_computes_its_share_in_batches(count: float, world: int, expected: float) -> None:
    """The ranks share the rows; each rank has at most 16 at once, and at least one."""
    sequences = Sequences(count=count, at_once=16.0, tokens=5.0, longest=9.0)
    sampling = Sampling(
        role="policy",
        times=1.0,
        count=count,
        at_once=16.0,
        prompt=3.0,
        response=4.0,
        steps=6.0,
        longest=9.0,
    )
    assert sequences.rows_at_once(world) == sampling.rows_at_once(world) == expected
