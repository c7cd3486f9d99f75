"""Warnings that need an interval appear: a reward model like a coin, and a score that rose while the accuracy fell."""

import pytest

from tests.ledger.small_run import artifact
from vantage.schemas.records.artifacts import Evaluation, RewardModel
from vantage.schemas.records.estimate_warnings import judges_by_chance, score_against_accuracy, warnings_about
from vantage.schemas.records.uncertainty import Uncertainty


def reward_model(correct: int, pairs: int, **more: float) -> RewardModel:
    share = correct / pairs
    error = (share * (1 - share) / pairs) ** 0.5
    known = {"pair_accuracy": Uncertainty(n=pairs, rows=pairs, standard_error=error)}
    metrics = {"pair_accuracy": share, **more}
    return artifact(RewardModel, "reward", {}, metrics=metrics, uncertainty=known)


@pytest.mark.parametrize(
    ("correct", "pairs", "warned"),
    [
        (59, 100, "may be no better than a coin"),  # Wilson's interval with t = 1.984 begins at 0.491
        (60, 100, None),  # at 0.501
        (62, 100, None),
        (41, 100, "may be no better than a coin"),
        (38, 100, "prefers rejected responses"),
        (560, 1000, None),
    ],
)
def test_a_reward_model_is_compared_with_a_coin(correct: int, pairs: int, warned: str | None) -> None:
    text = judges_by_chance(reward_model(correct, pairs))
    assert (text is None) == (warned is None)
    assert warned is None or (text is not None and warned in text)
    assert text is None or text in warnings_about(reward_model(correct, pairs))


def test_a_policys_implicit_rewards_are_no_reward_model() -> None:
    assert judges_by_chance(reward_model(50, 100, reward_gap=0.1)) is None


def evaluation(score: float, accuracy: float, *, differing: float | None = 0.04, **more: float) -> Evaluation:
    known = Uncertainty(n=400, rows=400, standard_error=0.01)
    uncertainty = {
        "score_gain": known,
        "accuracy_gain": known if differing is None else known.model_copy(update={"differing": differing}),
    }
    gains = {"score_gain": score, "accuracy_gain": accuracy, **more}
    return artifact(Evaluation, "evaluation", {}, metrics=gains, uncertainty=uncertainty)


def test_the_warning_has_both_changes_with_their_intervals_and_how_far_the_policy_went() -> None:
    text = score_against_accuracy(evaluation(0.93, -0.029, kl_to_baseline=6.52))
    assert text is not None
    assert "the score rose by 0.930 [0.910, 0.950] and the accuracy fell by 0.029 [0.0" in text
    assert "6.52 nats per response away from the baseline (KL)" in text
    without = score_against_accuracy(evaluation(0.93, -0.029))
    assert without is not None
    assert "nats" not in without


@pytest.mark.parametrize(
    ("score", "accuracy", "differing"),
    [(0.93, -0.001, 0.04), (0.93, 0.029, 0.04), (-0.93, -0.029, 0.04), (0.001, -0.029, 0.04), (0.93, -0.029, None)],
)  # fmt: skip
def test_what_is_not_sure_is_not_warned_of(score: float, accuracy: float, differing: float | None) -> None:
    """No warning appears either where an earlier version measured it, whose intervals are too narrow near zero."""
    assert score_against_accuracy(evaluation(score, accuracy, differing=differing)) is None
