"""Calibration of preferences equals hand-worked values and scikit-learn's, and finds a model that is too sure."""

import math

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss

from vantage.algorithms.calibration import (
    brier_scores,
    expected_calibration_error,
    preferred_probabilities,
    reliability,
)


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


def test_the_error_by_hand() -> None:
    """Confidences of 0.63 (right), 0.63 (wrong), 0.93 (right) and 0.5 (half right) fall into three of ten bins.

    Their summed gaps are |1 − 1.26| in the bin of 0.63, |1 − 0.93| in that of 0.93 and |0.5 − 0.5| in the first, so the
    error is (0.26 + 0.07)/4 = 0.0825.
    """
    margins = torch.tensor([logit(0.63), logit(0.37), logit(0.93), 0.0], dtype=torch.float64)
    assert expected_calibration_error(margins).tolist() == pytest.approx([0.0825])
    table = reliability(margins)
    assert [each.weight for each in table] == [1, 0, 2, 0, 0, 0, 0, 0, 1, 0]
    assert [each.low for each in table] == pytest.approx([0.5 + 0.05 * place for place in range(10)])
    assert table[2].accuracy == 0.5
    assert table[2].mean_confidence == pytest.approx(0.63)
    assert math.isnan(table[4].accuracy)
    assert brier_scores(margins).tolist() == pytest.approx([0.37**2, 0.63**2, 0.07**2, 0.25])


def test_a_confidence_at_the_edge_of_two_bins_belongs_to_the_lower_one() -> None:
    margins = torch.tensor([math.log(3)], dtype=torch.float64)
    assert preferred_probabilities(margins).item() == 0.75, "a number that float64 has"
    assert [each.weight for each in reliability(margins, num_bins=2)] == [1, 0]


def test_it_is_what_scikit_learn_counts() -> None:
    """Bins of width 0.05 from 0.5 on are the upper ten of twenty over the whole range."""
    rng = np.random.default_rng(1)
    margins = torch.tensor(rng.normal(0.5, 2.0, 400))
    probability = preferred_probabilities(margins).numpy()
    confidence, right = np.maximum(probability, 1 - probability), (margins.numpy() > 0).astype(int)
    accuracy, mean_confidence = calibration_curve(right, confidence, n_bins=20)
    table = [each for each in reliability(margins) if each.weight]
    assert [each.accuracy for each in table] == pytest.approx(accuracy.tolist())
    assert [each.mean_confidence for each in table] == pytest.approx(mean_confidence.tolist())
    shares = np.array([each.weight for each in table]) / 400
    expected = float((shares * np.abs(accuracy - mean_confidence)).sum())
    assert expected_calibration_error(margins).item() == pytest.approx(expected)
    labels, chances = np.r_[np.ones(400), np.zeros(400)], np.r_[probability, 1 - probability]
    assert brier_scores(margins).mean().item() == pytest.approx(brier_score_loss(labels, chances))


def test_a_model_that_is_twice_as_sure_as_it_may_be_is_found_out() -> None:
    """Outcomes are drawn with probability σ(m). Margins m are calibrated, and margins 2m are off by the mean of
    σ(2|m|) − σ(|m|)."""
    rng = np.random.default_rng(2)
    size = np.abs(rng.normal(0, 1.5, 100_000))
    right = rng.random(len(size)) < 1 / (1 + np.exp(-size))
    margins = torch.tensor(np.where(right, size, -size))
    assert expected_calibration_error(margins).item() < 0.006
    too_sure = float((1 / (1 + np.exp(-2 * size)) - 1 / (1 + np.exp(-size))).mean())
    assert expected_calibration_error(2 * margins).item() == pytest.approx(too_sure, abs=0.006)


def test_weights_are_copies_of_rows() -> None:
    rng = np.random.default_rng(3)
    margins = torch.tensor(rng.normal(size=30))
    counts = torch.tensor(rng.integers(0, 3, size=(2, 30)), dtype=torch.float64)
    expected = [expected_calibration_error(margins.repeat_interleave(each.long())).item() for each in counts]
    assert expected_calibration_error(margins, counts).tolist() == pytest.approx(expected)


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="one pair or more"):
        expected_calibration_error(torch.zeros(0))
    with pytest.raises(ValueError, match="weights has shape"):
        expected_calibration_error(torch.zeros(2), torch.ones(1, 3))
