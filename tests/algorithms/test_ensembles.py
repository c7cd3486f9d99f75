"""The scores of several models are combined as worked out by hand."""

import pytest
import torch

from vantage.algorithms.ensembles import combined, disagreement

SCORES = torch.tensor([[1.0, 5.0], [3.0, 5.0], [8.0, 5.0]], dtype=torch.float64)
"""Means 4 and 5; population variances (9 + 1 + 16)/3 and 0."""
STD = (26 / 3) ** 0.5


def test_combinations_by_hand() -> None:
    """Mean, minimum and lowered mean of several models' scores equal hand-worked ones."""
    assert combined(SCORES, "mean").tolist() == [4.0, 5.0]
    assert combined(SCORES, "min").tolist() == [1.0, 5.0]
    assert combined(SCORES, "mean_minus_std", k=0.5).tolist() == pytest.approx([4 - 0.5 * STD, 5.0])
    assert combined(SCORES, "mean_minus_std", k=0.0).tolist() == [4.0, 5.0]
    assert disagreement(SCORES).tolist() == pytest.approx([STD, 0.0])


def test_one_model_is_itself() -> None:
    """An ensemble of one model has this model's scores."""
    one = SCORES[:1]
    assert combined(one, "min").tolist() == combined(one, "mean").tolist() == [1.0, 5.0]
    assert combined(one, "mean_minus_std").tolist() == [1.0, 5.0]
    assert disagreement(one).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("shape", [(3,), (0, 4), (1, 2, 3)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"they are \(M,B\) of one model or more"):
        combined(torch.zeros(shape), "mean")
