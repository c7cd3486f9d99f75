"""The length-controlled win rate equals that of scikit-learn's logistic regression, and the answer where that is known."""

import numpy as np
import pytest
import torch
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

from vantage.algorithms.length_control import length_controlled_win_rate


def by_scikit_learn(wins: np.ndarray, differences: np.ndarray) -> float:
    """Return the win rate at equal lengths: each pair is fitted twice, as won and as lost, with weights of ``wins`` and
    1 − ``wins``; the prior's variance is C = 1.
    """
    feature = np.tanh(differences / differences.std(ddof=1))[:, None]
    model = LogisticRegression(C=1.0, tol=1e-12, max_iter=100_000)
    labels = np.r_[np.ones(len(wins)), np.zeros(len(wins))]
    model.fit(np.r_[feature, feature], labels, sample_weight=np.r_[wins, 1 - wins])
    return float(expit(model.intercept_[0]))


def drawn(seed: int, *, count: int, skill: float, by_length: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    differences = rng.normal(8, 20, count).round()
    chance = expit(skill + by_length * np.tanh(differences / differences.std(ddof=1)))
    wins = (rng.random(count) < chance).astype(float)
    wins[rng.random(count) < 0.2] = 0.5
    return wins, differences


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("by_length", [-1.0, 0.0, 2.0, 6.0])
def test_it_is_the_regression_of_scikit_learn(seed: int, by_length: float) -> None:
    """The length-controlled win rate equals the one of scikit-learn's logistic regression."""
    wins, differences = drawn(seed, count=150, skill=0.4, by_length=by_length)
    found = length_controlled_win_rate(
        torch.tensor(wins), torch.tensor(differences), torch.ones(1, 150, dtype=torch.float64)
    )
    assert found.item() == pytest.approx(by_scikit_learn(wins, differences), abs=1e-6)


def test_weights_are_copies_of_rows() -> None:
    wins, differences = drawn(7, count=60, skill=-0.5, by_length=1.0)
    counts = np.random.default_rng(8).integers(0, 4, size=(3, 60))
    found = length_controlled_win_rate(
        torch.tensor(wins), torch.tensor(differences), torch.tensor(counts, dtype=torch.float64)
    )
    expected = [by_scikit_learn(wins.repeat(each), differences.repeat(each)) for each in counts]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_longer_candidate_without_skill_wins_half() -> None:
    """The judge prefers the longer response, by a logistic law without an intercept; the candidate writes 8 tokens more."""
    wins, differences = drawn(3, count=40_000, skill=0.0, by_length=1.5)
    weights = torch.ones(1, len(wins))
    found = length_controlled_win_rate(torch.tensor(wins), torch.tensor(differences), weights)
    assert wins.mean() > 0.55
    assert found.item() == pytest.approx(0.5, abs=0.01)


def test_where_there_is_nothing_to_fit() -> None:
    lengths = torch.tensor([1.0, 2.0, 5.0, -1.0])
    weights = torch.ones(1, 4)
    for win in (0.0, 1.0):
        rate = length_controlled_win_rate(torch.full((4,), win), lengths, weights)
        assert rate.tolist() == [win]
        of_resamples = length_controlled_win_rate(
            torch.full((4,), win), lengths, torch.tensor([[1.0, 0, 0, 1], [3, 0, 2, 1]])
        )
        assert of_resamples.tolist() == [win, win], "sums of weights other than the number of pairs"
    mixed = torch.tensor([1.0, 0.0, 1.0, 1.0])
    assert length_controlled_win_rate(mixed, torch.full((4,), 3.0), weights).item() == pytest.approx(0.75)
    assert length_controlled_win_rate(torch.full((4,), 0.5), lengths, weights).item() == pytest.approx(0.5)


def test_length_alone_decides() -> None:
    """Where length separates wins from losses, the prior keeps the rate inside of 0 and 1; by symmetry it is a half."""
    lengths = torch.tensor([-3.0, -2.0, -1.0, 1.0, 2.0, 3.0])
    rate = length_controlled_win_rate((lengths > 0).double(), lengths, torch.ones(1, 6))
    assert rate.item() == pytest.approx(0.5)


def test_wrong_shapes_and_wins_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be \(N,\), \(N,\) and \(R,N\)"):
        length_controlled_win_rate(torch.ones(3), torch.ones(2), torch.ones(1, 3))
    with pytest.raises(ValueError, match="outside of 0 to 1"):
        length_controlled_win_rate(torch.tensor([2.0]), torch.ones(1), torch.ones(1, 1))
