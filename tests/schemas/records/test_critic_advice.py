"""Each rule of advice about a critic applies where it should, gives its sentence, and is silent elsewhere."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.schemas.critic_samples import critic, estimated, of_slice
from vantage.schemas.records.critic_advice import (
    advice_on_drift,
    advice_on_pretraining,
    is_below_zero,
    number,
    share,
    tokens,
)
from vantage.schemas.records.critic_diagnosis import CriticDrift, DiagnosedAdvantages, DriftPoint, Ordering


def of_advantages(ours: float, others: float | None) -> DiagnosedAdvantages:
    return DiagnosedAdvantages(
        critic=estimated(ours),
        batch_mean=estimated(4.0),
        others_mean=None if others is None else estimated(others),
        ratio=estimated(ours / 4),
    )


def first(**changes: Any) -> tuple[str, str]:
    """Return rule and text of the first advice."""
    advice = advice_on_pretraining(critic(**changes))[0]
    return advice.rule, advice.text


def test_a_good_critic_is_to_be_used_and_nothing_else_is_said() -> None:
    [only] = advice_on_pretraining(critic())
    assert (only.rule, only.level) == ("usable", "good")
    assert only.text == (
        "Use it: it explains 0.60 of the returns' variance, 95 % interval 0.58 to 0.62, and squared advantages are 0.40 of the "
        "batch mean's."
    )


def test_equal_returns() -> None:
    """If all returns are equal, the advice is to look at the reward."""
    rule, text = first(explained_variance=estimated(None, None))
    assert rule == "equal_returns"
    assert "look at the reward" in text


@pytest.mark.parametrize("explained", [0.0, -0.4])
def test_a_critic_that_explains_nothing(explained: float) -> None:
    rule, text = first(explained_variance=estimated(explained))
    assert rule == "explains_nothing"
    assert (
        "Pretrain longer (stages.value.iterations: 20), or switch (algorithm.critic_ev_threshold: 0" in text
    )


def test_longer_is_no_advice_where_the_critic_was_best_early() -> None:
    for best, text in ((7, "was best after 7 of 10"), (8, "iterations: 20")):
        assert text in first(explained_variance=estimated(-1.0), best_iteration=best)[1]


def test_too_few_prompts_to_tell() -> None:
    rule, text = first(explained_variance=estimated(0.1, 0.06))
    assert rule == "too_few_prompts"
    assert text.startswith("100 prompts are too few to tell")
    assert "stages.value.test_samples" in text
    assert first(explained_variance=estimated(0.1, None))[0] == "too_few_prompts"
    assert first(explained_variance=estimated(0.1, 0.04))[0] == "usable"


@pytest.mark.parametrize(
    ("family", "label", "where"),
    [
        ("by_length", "64-127", "on responses of 64 to 127 tokens (10 % of the tokens)"),
        ("by_tokens_left", "65536+", "65,536 tokens or more before the end"),
        ("by_tenth", "1", "in tenth 1 of the response"),
        ("by_difficulty", "hardest", "on the hardest third of the responses"),
    ],
)
def test_below_zero_in_a_part(family: str, label: str, where: str) -> None:
    rule, text = first(**{family: (of_slice(label, -0.1), of_slice("2-3", 0.5))})
    assert rule == "below_zero_in_parts"
    assert text.startswith(f"Below 0 {where}")
    assert "pretrain longer (stages.value.iterations: 20), or switch" in text


def test_a_part_whose_interval_reaches_above_zero_is_not_named() -> None:
    assert first(by_length=(of_slice("64-127", -0.1, error=0.06),))[0] == "usable"
    assert is_below_zero(estimated(-0.1, 0.04)) and not is_below_zero(estimated(-0.1, None))


def test_a_group_is_the_better_baseline() -> None:
    rule, text = first(advantages=of_advantages(2.0, 1.8))
    assert rule == "others_are_better"
    assert "(mean square 1.80 against 2.00)" in text
    assert first(advantages=of_advantages(2.0, 1.95))[0] == "usable"


def test_a_biased_critic() -> None:
    """A large bias of the critic comes first in the advice."""
    rule, text = first(bias=estimated(0.51, 0.01))
    assert rule == "biased"
    assert "too high by 0.510 on average, while returns have a standard deviation of 2.00" in text
    assert "policy_starts_at: 2" in text
    assert "too low by 0.51" in first(bias=estimated(-0.51, 0.01))[1]
    assert first(bias=estimated(0.49, 0.01))[0] == "usable"  # a quarter of a standard deviation is 0.5
    assert first(bias=estimated(0.6, 0.4))[0] == "usable"  # the share may be 0


def test_order_by_chance() -> None:
    """The interval reaches from 0.1 by the x with x² = t²·(0.06² + h·x/100), t = 1.984. With h = 1.1 below and 0.9
    above it, the ends are 0.1 − 0.143 and 0.1 + 0.138."""
    rule, text = first(orderings=(Ordering(at=0.5, correlation=estimated(0.1, 0.06)),))
    assert rule == "orders_by_chance"
    assert "rank correlation 0.10, 95 % interval -0.04 to 0.24" in text
    assert first(orderings=(Ordering(at=0.25, correlation=estimated(-0.5)),))[0] == "usable"


def test_single_responses_are_a_note_after_what_to_do() -> None:
    found = advice_on_pretraining(critic(within_prompts=None, advantages=of_advantages(1.6, None)))
    assert [(each.rule, each.level) for each in found] == [("usable", "good"), ("one_response_each", "note")]
    assert "stages.value.test_samples: 400" in found[1].text


def test_the_most_serious_comes_first() -> None:
    found = advice_on_pretraining(
        critic(explained_variance=estimated(-1.0), bias=estimated(3.0), advantages=of_advantages(9.0, 2.0))
    )
    assert [each.rule for each in found] == ["explains_nothing", "others_are_better", "biased"]


# -- during policy optimisation


def drift(explained: Sequence[float | None], *, switched: bool = False, running: bool = False) -> CriticDrift:
    points = tuple(
        DriftPoint(iteration=number, explained_variance=each) for number, each in enumerate(explained, 1)
    )
    return CriticDrift(step="policy", points=points, is_switched=switched, is_running=running)


@pytest.mark.parametrize(
    ("course", "rule", "said"),
    [
        ([0.5] * 8, "keeps_up", "from 0.50 to 0.50. Nothing to do"),
        ([0.5] * 6 + [-0.1] * 2, "ends_below_zero", "critic_ev_threshold: 0"),
        ([0.9] * 6 + [0.5] * 2, "falls", "falls from 0.90 to 0.50"),
        ([0.4] * 6 + [0.25] * 2, "keeps_up", "from 0.40 to 0.25"),  # 0.15 of the variance, whatever it was
        ([-0.5, -0.1] + [0.5] * 6, "starts_below_zero", "policy_starts_at: 2"),
        ([-0.5] + [0.5] * 7, "starts_below_zero", "first 1 iteration,"),
        ([None, 0.4, None, 0.5, 0.5, 0.5], "keeps_up", "from 0.40 to 0.50"),
        ([0.4, 0.5, 0.6], "too_early", "is 0.60, above 0; 3 of policy's iterations are too few"),
        ([0.4, -0.5], "ends_below_zero", "ends at -0.50"),
        ([None], "not_measured", "undefined in all iterations"),
        ([], "not_measured", "undefined"),
    ],
)
def test_the_course_of_a_critic(course: list[float | None], rule: str, said: str) -> None:
    [only] = advice_on_drift(drift(course))
    assert only.rule == rule
    assert said in only.text


@pytest.mark.parametrize(
    ("losses", "rule"), [((2.0, 1.0), "less_to_explain"), ((1.0, 2.0), "falls"), ((None, None), "falls")]
)
def test_explained_variance_that_falls_with_the_returns_variance(
    losses: tuple[float | None, float | None], rule: str
) -> None:
    course = [
        DriftPoint(iteration=each, explained_variance=0.9 - 0.1 * each, value_loss=losses[each > 2])
        for each in range(1, 5)
    ]
    [only] = advice_on_drift(CriticDrift(step="policy", points=tuple(course), is_switched=False))
    assert only.rule == rule
    assert "value loss 2.00 to 1.00" in only.text or rule == "falls"


def test_a_switch_that_left_the_critic_out_is_said() -> None:
    [only] = advice_on_drift(drift([0.5] * 6 + [-0.1] * 2, switched=True))
    assert (only.rule, only.level) == ("switched_off", "warning")
    assert "left the critic out" in only.text
    assert advice_on_drift(drift([-0.5] + [0.5] * 7, switched=True))[0].rule == "keeps_up"


def test_a_running_stage_without_an_iteration_is_looked_at_later() -> None:
    [only] = advice_on_drift(drift([], running=True))
    assert only.text == "policy has measured no iteration yet: look again later."


def test_words() -> None:
    """Ranges of tokens and numbers are written in words."""
    assert [tokens(label) for label in ("1", "8-15", "65536+")] == [
        "1 token",
        "8 to 15 tokens",
        "65,536 tokens or more",
    ]
    assert [number(each) for each in (None, 0.0, 0.12345, -3.0, 12345.6)] == [
        "–",
        "0",
        "0.123",
        "-3.00",
        "12,346",
    ]
    assert [share(each) for each in (None, 0.598, -3.0, -12345.6)] == ["–", "0.60", "-3.00", "-12,346"]


def test_two_decimals_have_no_negative_zero() -> None:
    assert [share(value) for value in (-0.004, -0.0, 0.004, -0.006, 0.995, -123.4, None)] == [
        "0.00", "0.00", "0.00", "-0.01", "0.99", "-123", "–",
    ]  # fmt: skip
