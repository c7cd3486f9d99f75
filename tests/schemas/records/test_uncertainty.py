"""Intervals of metrics: against scipy and statsmodels' textbook numbers, and by how often they hold the truth."""

import math

import numpy as np
import pytest
from scipy.stats import t as student

from vantage.schemas.kinds import KINDS
from vantage.schemas.records.metrics import estimated_metric_names, headline_metric_names
from vantage.schemas.records.uncertainty import (
    COMPARISONS,
    SHARES,
    Uncertainty,
    effective_rows,
    interval_of,
    smallest_conclusive_share,
)


def of_rows(share: float, n: int) -> Uncertainty:
    """Of n prompts with one row each, right or wrong."""
    return Uncertainty(n=n, rows=n, standard_error=math.sqrt(share * (1 - share) / (n - 1)))


def wilson_roots(share: float, n: float, t: float) -> list[float]:
    """The two p at which |share − p| = t·√(p(1 − p)/n): Wilson's definition, solved as a quadratic by numpy."""
    roots = np.roots([1 + t * t / n, -2 * share - t * t / n, share * share])
    return sorted(float(root.real) for root in roots)


def test_a_mean_gets_students_t() -> None:
    found = interval_of("test_nll", 2.0, Uncertainty(n=9, rows=30, standard_error=0.1), confidence=0.9)
    assert found == pytest.approx(student.interval(0.9, df=8, loc=2.0, scale=0.1))


@pytest.mark.parametrize(("right", "n"), [(23, 32), (1, 10), (250, 256), (4, 4), (0, 7)])
def test_a_share_gets_wilsons_interval(right: int, n: int) -> None:
    share = right / n
    found = interval_of("pair_accuracy", share, of_rows(share, n), confidence=0.95)
    assert found == pytest.approx(wilson_roots(share, n, student.ppf(0.975, n - 1)), abs=1e-12)


def test_four_right_of_four_are_sure_of_little() -> None:
    low, high = interval_of("pair_accuracy", 1.0, of_rows(1.0, 4), confidence=0.95) or (0, 0)
    assert (round(low, 3), high) == (0.283, 1.0)  # 4/(4 + 3.182²)


def test_alike_responses_count_less() -> None:
    """The error of 100 prompts with 4 equal responses each is that of 100 rows; of 4 independent ones that of 400."""
    for rows_worth in (100, 400):
        error = math.sqrt(0.8 * 0.2 / rows_worth)
        sure = Uncertainty(n=100, rows=400, standard_error=error)
        assert effective_rows(0.8, sure) == pytest.approx(min(rows_worth * 100 / 99, 400))
    assert effective_rows(0.5, Uncertainty(n=100, rows=400, standard_error=0.0)) == 100
    assert effective_rows(0.5, Uncertainty(n=100, rows=400, standard_error=1e-9)) == 400


@pytest.mark.parametrize("metric", ["test_nll", "pair_accuracy", "accuracy_gain"])
def test_one_prompt_tells_nothing(metric: str) -> None:
    for sure in (
        Uncertainty(n=1, rows=8, standard_error=None),
        Uncertainty(n=3, rows=8, standard_error=None),
    ):
        assert interval_of(metric, 0.5, sure, confidence=0.95) is None


def test_prompts_that_are_all_alike() -> None:
    """Of a bounded difference: at most t²/(n + t²) of all prompts differ, by 2; of an unbounded mean: no one knows."""
    alike = Uncertainty(n=4, rows=4, standard_error=0.0)
    bound = 2 * 3.182446**2 / (4 + 3.182446**2)
    assert interval_of("accuracy_gain", 1.0, alike, confidence=0.95) == pytest.approx((1 - bound, 1.0))
    assert interval_of("accuracy_gain", 0.0, alike, confidence=0.95) == (-1.0, 1.0)
    many = Uncertainty(n=256, rows=1024, standard_error=0.0)
    low, high = interval_of("accuracy_gain", 0.0, many, confidence=0.95) or (0, 0)
    assert -0.04 < low < 0 < high < 0.04
    assert interval_of("score_gain", 0.0, alike, confidence=0.95) is None


@pytest.mark.parametrize(("n", "share"), [(8, 0.5), (8, 0.9), (32, 0.7), (32, 0.95), (256, 0.8)])
def test_the_interval_of_independent_rows_holds_the_true_share_as_often_as_it_says(
    n: int, share: float
) -> None:
    from scipy.stats import binom

    held = 0.0
    for right in range(n + 1):
        low, high = interval_of("win_rate", right / n, of_rows(right / n, n), confidence=0.95) or (0, 0)
        held += binom.pmf(right, n, share) * (low <= share <= high)
    assert held >= 0.93


def test_the_interval_of_clustered_rows_holds_the_true_share_as_often_as_it_says() -> None:
    """40 prompts with 4 responses each, right with a chance of the prompt's own, Beta(2, 1), whose mean is 2/3."""
    rng, held = np.random.default_rng(7), 0
    for _ in range(3000):
        by_prompt = rng.binomial(4, rng.beta(2, 1, size=40)) / 4
        sure = Uncertainty(n=40, rows=160, standard_error=float(np.std(by_prompt, ddof=1) / math.sqrt(40)))
        low, high = interval_of("accuracy", float(by_prompt.mean()), sure, confidence=0.95) or (0, 0)
        held += low <= 2 / 3 <= high
    assert 0.935 < held / 3000 < 0.975


def test_how_many_prompts_can_tell() -> None:
    assert smallest_conclusive_share(0.7, 1) is smallest_conclusive_share(0.7, 4) is None
    needed = smallest_conclusive_share(0.7, 32)
    assert needed == 28 / 32
    for share, tells in ((needed, True), (needed - 1 / 32, False)):
        low, _ = interval_of("pair_accuracy", share, of_rows(share, 32), confidence=0.95) or (0, 0)
        assert (low > 0.7) is tells


def test_what_is_estimated_is_measured() -> None:
    estimated = {kind: estimated_metric_names(kind) for kind in KINDS}
    for kind, names in estimated.items():
        assert names <= headline_metric_names(kind), kind
    for judge in ("verifier", "reward"):
        assert estimated_metric_names("evaluation", has=[judge]) <= headline_metric_names(
            "evaluation", has=[judge]
        )
    assert estimated_metric_names("prepare_data") == frozenset()
    assert frozenset().union(*estimated.values()) >= (SHARES | COMPARISONS)


def test_a_resampled_statistic_has_the_interval_of_the_next_greater_confidence() -> None:
    kept = ((0.9, 0.2, 0.5), (0.95, 0.1, 0.6))
    uncertainty = Uncertainty(n=50, rows=100, standard_error=0.1, intervals=kept)
    asked = {
        each: interval_of("length_controlled_win_rate", 0.3, uncertainty, confidence=each)
        for each in (0.5, 0.9, 0.91, 0.95, 0.96)
    }
    assert asked == {0.5: (0.2, 0.5), 0.9: (0.2, 0.5), 0.91: (0.1, 0.6), 0.95: (0.1, 0.6), 0.96: None}
    told = Uncertainty.model_validate_json(uncertainty.model_dump_json())
    assert told == uncertainty
    assert "intervals" not in Uncertainty(n=2, rows=2, standard_error=0.0).model_dump()
