"""Intervals of metrics equal scipy's and statsmodels' textbook numbers, and contain the truth as often as they promise."""

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
    carried,
    effective_rows,
    interval_of,
    smallest_conclusive_share,
)


def of_rows(share: float, n: int) -> Uncertainty:
    """Return the uncertainty of a share of n prompts with one row each, right or wrong."""
    return Uncertainty(n=n, rows=n, standard_error=math.sqrt(share * (1 - share) / (n - 1)))


def wilson_roots(share: float, n: float, t: float) -> list[float]:
    """Return the two p with |share − p| = t·√(p(1 − p)/n), Wilson's definition, which numpy solves as a quadratic."""
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
    """100 prompts have 4 responses each, and 0.8 are right. The design effect is the mean of the one found on 20
    prompts' worth of wrong responses and of 4, which two more prompts are assumed to have.

    Equal responses have an error of √(0.16/99), a design effect of 4, and count as 100 rows. Independent ones have a
    design effect of 1, taken as (20·1 + 2·4)/22 = 14/11, and count as 400·11/14. Without an error the effect is 4.
    """
    for error, rows in (
        (math.sqrt(0.16 / 99), 100),
        (math.sqrt(0.16 / 400 * 100 / 99), 400 * 11 / 14),
        (1e-9, 400 * 11 / 14),  # a smaller error than that of independent rows is chance
        (0.0, 100),
    ):
        assert effective_rows(0.8, Uncertainty(n=100, rows=400, standard_error=error)) == pytest.approx(rows)


def test_one_row_a_prompt_is_one_row() -> None:
    for share, n in ((0.5, 10), (0.9, 10), (1.0, 4), (0.0, 7)):
        assert effective_rows(share, of_rows(share, n)) == pytest.approx(n)


def test_prompts_of_unequal_size_count_less() -> None:
    """4 prompts with 1, 1, 2 and 8 of 12 rows count as 144/70 = 2.06 prompts of one size. Of a training stage only its
    10 rows and 4 prompts are known. These cannot have one size, so the greatest design effect counts as 2 · 10/4."""
    known = Uncertainty(n=4, rows=12, standard_error=0.0, equal_prompts=144 / 70)
    assert effective_rows(1.0, known) == pytest.approx(144 / 70)
    assert effective_rows(1.0, Uncertainty(n=4, rows=10, standard_error=0.0)) == pytest.approx(2.0)


@pytest.mark.parametrize("metric", ["test_nll", "pair_accuracy", "accuracy_gain"])
def test_one_prompt_tells_nothing(metric: str) -> None:
    for sure in (
        Uncertainty(n=1, rows=8, standard_error=None),
        Uncertainty(n=3, rows=8, standard_error=None),
    ):
        assert interval_of(metric, 0.5, sure, confidence=0.95) is None


def test_prompts_that_are_all_alike() -> None:
    """A bounded difference gets the interval that a score test does not reject; an unbounded mean gets none.

    If all of 4 prompts gained, it is Wilson's interval of 4 of 4 on the scale of differences. If none of 256 differs,
    the bound is the δ with 256·δ² = t²·δ·(1 − δ), which is t²/(256 + t²).
    """
    alike = Uncertainty(n=4, rows=4, standard_error=0.0)
    share = 4 / (4 + 3.182446**2)
    assert interval_of("accuracy_gain", 1.0, alike, confidence=0.95) == pytest.approx((2 * share - 1, 1.0))
    many = Uncertainty(n=256, rows=1024, standard_error=0.0)
    bound = student.ppf(0.975, 255) ** 2 / (256 + student.ppf(0.975, 255) ** 2)
    assert interval_of("accuracy_gain", 0.0, many, confidence=0.95) == pytest.approx((-bound, bound))
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
    """40 prompts have 4 responses each, which are right with the prompt's own probability. It is drawn from Beta(2, 1),
    whose mean is 2/3."""
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
        each: interval_of("expected_calibration_error", 0.3, uncertainty, confidence=each)
        for each in (0.5, 0.9, 0.91, 0.95, 0.96)
    }
    assert asked == {0.5: (0.2, 0.5), 0.9: (0.2, 0.5), 0.91: (0.1, 0.6), 0.95: (0.1, 0.6), 0.96: None}
    told = Uncertainty.model_validate_json(uncertainty.model_dump_json())
    assert told == uncertainty
    assert set(Uncertainty(n=2, rows=2, standard_error=0.0).model_dump()) == {"n", "rows", "standard_error"}


def test_resamples_that_never_differ_are_no_interval() -> None:
    kept = Uncertainty(n=2, rows=2, standard_error=0.0, intervals=((0.95, 0.01, 0.01),))
    assert interval_of("expected_calibration_error", 0.01, kept, confidence=0.95) is None
    rate = kept.model_copy(update={"intervals": ((0.99, 1.0, 1.0),)})
    low, high = interval_of("length_controlled_win_rate", 1.0, rate, confidence=0.99) or (0, 0)
    assert low < 0.001
    assert high == 1.0


def test_a_ratio_of_perplexities_is_as_far_from_1_either_way() -> None:
    """The interval of 1/r is the reciprocal of that of r: both are t on the logarithm, whose error is error/value."""
    ours = Uncertainty(n=20, rows=20, standard_error=0.2)
    low, high = interval_of("perplexity_ratio", 0.5, ours, confidence=0.95) or (0, 0)
    theirs = Uncertainty(n=20, rows=20, standard_error=0.8)
    assert interval_of("perplexity_ratio", 2.0, theirs, confidence=0.95) == pytest.approx((1 / high, 1 / low))
    assert low == pytest.approx(0.5 * math.exp(-student.ppf(0.975, 19) * 0.4))


def test_few_prompts_that_carry_an_explained_variance_close_it() -> None:
    """A squared error of 0.04 ± 0.02 is carried by 4 prompts, of 0.04 ± 0.01 by 16."""
    own = {"explained_variance": Uncertainty(n=64, rows=64, standard_error=0.1)}
    metrics = {"explained_variance": 0.5, "value_mse": 0.04}
    for error, prompts in ((0.02, 4), (0.01, 16)):
        known = own | {"value_mse": Uncertainty(n=64, rows=64, standard_error=error)}
        found = carried("explained_variance", metrics, known)
        assert found is not None
        assert found.prompts == pytest.approx(prompts)
        interval = interval_of(
            "explained_variance", 0.5, found.uncertainty, confidence=0.95, carrying=found.prompts
        )
        assert (interval is None) is (prompts < 10)
    least = own | {
        "value_mse": Uncertainty(n=64, rows=64, standard_error=0.02),
        "others_mean_mse": Uncertainty(n=64, rows=64, standard_error=0.01),
    }
    fewest = carried("explained_variance", metrics | {"others_mean_mse": 0.05}, least)
    assert fewest is not None and fewest.prompts == pytest.approx(4), "of the two squares, the one of fewer"
    low, high = interval or (0, 0)
    t = student.ppf(0.975, 63)
    assert (low, high) == pytest.approx((1 - 0.5 * math.exp(t / 5), 1 - 0.5 * math.exp(-t / 5)))
    assert carried("pair_accuracy", {}, {"pair_accuracy": own["explained_variance"]}) is None


def test_a_ratio_of_squares_is_no_surer_than_the_explained_variance() -> None:
    known = {
        "explained_variance": Uncertainty(n=64, rows=64, standard_error=0.1),
        "squared_advantage_ratio": Uncertainty(n=64, rows=64, standard_error=0.02),
    }
    found = carried("squared_advantage_ratio", {"squared_advantage_ratio": 0.5}, known)
    assert found is not None
    assert found.uncertainty.standard_error == 0.1


def test_a_bounded_mean_holds_what_was_not_drawn() -> None:
    """16 prompts have a Brier score of 0. The share x of prompts with a score of 1 may be as large as x² = t²·x/16, so
    x = t²/16."""
    alike = Uncertainty(n=16, rows=16, standard_error=0.0)
    low, high = interval_of("brier_score", 0.0, alike, confidence=0.95) or (1, 0)
    assert (low, high) == pytest.approx((0.0, student.ppf(0.975, 15) ** 2 / 16))


def test_a_benchmarks_answers_are_a_share() -> None:
    """lm-eval's error of an accuracy is √(p·(1 − p)/(n − 1)); another metric of the same value keeps t."""
    of_answers = interval_of("benchmark_score", 63 / 64, of_rows(63 / 64, 64), confidence=0.95)
    assert of_answers == pytest.approx(wilson_roots(63 / 64, 64, student.ppf(0.975, 63)))
    other = Uncertainty(n=64, rows=64, standard_error=0.03)
    assert interval_of("benchmark_score", 63 / 64, other, confidence=0.95) == pytest.approx(
        student.interval(0.95, df=63, loc=63 / 64, scale=0.03)
    )
