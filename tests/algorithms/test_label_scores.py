"""Scores from the probabilities of a few answers equal hand-worked values."""

from math import log

import pytest
import torch

from vantage.algorithms.label_scores import expected_scores, total_probability

# Two questions, the answers 1, 2 and 3; the first model would answer something else with probability 0.2.
PROBABILITIES = [[0.1, 0.2, 0.5], [0.25, 0.5, 0.25]]
LOGPROBS = torch.tensor([[log(p) for p in row] for row in PROBABILITIES], dtype=torch.float64)


def test_the_score_is_the_mean_weighted_by_the_probabilities_of_the_answers() -> None:
    """The scores are (0.1·1 + 0.2·2 + 0.5·3) / 0.8 = 2.5 and 0.25 + 1 + 0.75 = 2."""
    found = expected_scores(LOGPROBS, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    assert found.tolist() == pytest.approx([2.5, 2.0], abs=1e-12)


def test_a_preference_is_the_share_of_the_first_letter() -> None:
    """Probabilities of 0.3 for A and 0.1 for B give a preference of 3/4 for A."""
    logprobs = torch.tensor([[log(0.3), log(0.1)]], dtype=torch.float64)
    assert expected_scores(logprobs, torch.tensor([1.0, 0.0])).tolist() == pytest.approx([0.75], abs=1e-12)


def test_the_probability_of_any_of_the_answers() -> None:
    assert total_probability(LOGPROBS).tolist() == pytest.approx([0.8, 1.0], abs=1e-12)


def test_tiny_probabilities_give_a_score_too() -> None:
    """e^-2000 and e^-2001, both 0 in float64, have the shares e/(1 + e) and 1/(1 + e)."""
    logprobs = torch.tensor([[-2000.0, -2001.0]], dtype=torch.float64)
    found = expected_scores(logprobs, torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert found.item() == pytest.approx(2.718281828459045 / 3.718281828459045)
