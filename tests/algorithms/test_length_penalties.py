"""Penalties of length equal hand-worked values and NumPy's."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vantage.algorithms.length_penalties import linear_penalty, relative_penalty


def test_linear_by_hand() -> None:
    """The linear penalty of length equals the one worked out by hand."""
    assert linear_penalty(torch.tensor([0, 5, 10, 15]), limit=10).tolist() == [0.0, -0.5, -1.0, -1.5]
    with pytest.raises(ValueError, match="limit=0 must be positive"):
        linear_penalty(torch.tensor([1]), limit=0)


def test_relative_by_hand() -> None:
    """One prompt has lengths 2, 4 and 6, another has 7 and 7, and a third has one response."""
    found = relative_penalty(torch.tensor([2, 7, 4, 6, 7, 3]), torch.tensor([1, 0, 1, 1, 0, 8]))
    assert found.tolist() == [0.5, 0.0, 0.0, -0.5, 0.0, 0.0]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=30), st.randoms())
def test_relative_against_numpy(rows: list[tuple[int, int]], random: Any) -> None:
    """The penalty relative to the group's lengths equals NumPy's."""
    groups, lengths = (np.array(column) for column in zip(*rows, strict=True))
    expected = np.zeros(len(rows))
    for group in set(groups):
        of_group = lengths[groups == group]
        spread = of_group.max() - of_group.min()
        if spread:
            expected[groups == group] = 0.5 - (of_group - of_group.min()) / spread
    order = np.array(random.sample(range(len(rows)), len(rows)))
    found = relative_penalty(torch.tensor(lengths[order]), torch.tensor(groups[order]))
    np.testing.assert_allclose(found.numpy(), expected[order])
