"""The effects of evaluations, the alarms and the conclusion of a run equal numbers that are worked out by hand."""

import pytest

from tests.ledger.small_run import EVALUATION
from tests.ledger.test_remarks import SFT, policy
from tests.schemas.records.test_estimate_warnings import evaluation
from vantage.ledger.operations import Input
from vantage.ledger.remarks import remark_on
from vantage.schemas.recipe.guards import Guard
from vantage.schemas.records.alarms import Alarm, alarms_of
from vantage.schemas.records.conclusions import Conclusion, Judged, conclude
from vantage.schemas.records.effects import Effect, effects_of
from vantage.schemas.records.estimate_warnings import score_against_accuracy
from vantage.schemas.records.firings import Firing

METRICS = {"accuracy": 0.911, "baseline_accuracy": 0.6, "accuracy_gain": 0.311}


def effect(low: float, high: float, value: float = 0.3) -> Effect:
    return Effect("accuracy_gain", "accuracy", value, 0.0, (low, high), (0.9, 0.6))


def judged(*effects: Effect) -> Judged:
    return Judged("evaluation", "policy", "sft", effects)


def test_an_effect_in_words() -> None:
    [found] = effects_of(METRICS, {"accuracy_gain": (0.268, 0.352)}, {"accuracy_gain": 512})
    assert found.direction == "better" and found.short == "accuracy +0.311 (0.268 to 0.352)"
    assert found.sentence("policy", "sft") == (
        "policy is better than sft: accuracy 0.911 against 0.600, a difference of +0.311 "
        "(95 % interval 0.268 to 0.352; 512 prompts)."
    )


@pytest.mark.parametrize(
    ("interval", "direction"),
    [
        ((0.01, 0.2), "better"),
        ((-0.2, -0.01), "worse"),
        ((-0.01, 0.2), "not shown"),
        ((0.0, 0.2), "not shown"),  # equal policies are not excluded
        ((-0.2, 0.0), "not shown"),
        (None, "unknown"),
    ],
)
def test_the_direction_follows_from_the_interval(
    interval: tuple[float, float] | None, direction: str
) -> None:
    known = {} if interval is None else {"accuracy_gain": interval}
    assert [each.direction for each in effects_of(METRICS, known, {})] == [direction]


def test_a_rate_is_compared_with_one_half() -> None:
    metrics = {"win_rate": 0.54, "order_disagreement": 0.2}
    [found] = effects_of(metrics, {"win_rate": (0.51, 0.57)}, {})
    assert found.direction == "better" and found.short == "win rate 0.540 (0.510 to 0.570)"
    assert [each.direction for each in effects_of(metrics, {"win_rate": (0.4, 0.49)}, {})] == ["worse"]


def test_right_answers_come_before_scores_and_a_repeated_rate_is_left_out() -> None:
    both = METRICS | {"score": 1.0, "baseline_score": 2.0, "score_gain": -1.0, "win_rate": 0.7}
    assert [each.metric for each in effects_of(both, {}, {})] == ["accuracy_gain", "score_gain"]
    assert effects_of({"accuracy_gain": None, "accuracy": 0.5, "baseline_accuracy": 0.5}, {}, {}) == ()
    assert effects_of({"accuracy": 0.5}, {}, {}) == ()


def test_a_conclusion_names_how_it_ended_the_alarms_and_the_effect() -> None:
    good = judged(effect(0.25, 0.35))
    assert conclude("completed", [good], []) == Conclusion("good", "better: accuracy +0.300 (0.25 to 0.35)")
    alarm = Alarm("policy", "Learned nothing", "the best weights are those of sft")
    assert conclude("completed", [good], [alarm, alarm]) == Conclusion(
        "bad", "learned nothing; better: accuracy +0.300 (0.25 to 0.35)"
    )
    fired, too_far = Alarm("policy", "A guard fired", "…"), Alarm("evaluation", "Over-optimisation", "…")
    assert conclude("completed", [], [fired, alarm, too_far]).text == (
        "over-optimisation; learned nothing; a guard fired; nothing was compared"
    ), "the gravest first"
    assert conclude("gate_closed", [good], []).text == "gate closed; better: accuracy +0.300 (0.25 to 0.35)"
    assert conclude("gate_closed", [good], []).level == "bad", "good numbers open no gate"
    assert conclude("failed", [], []) == Conclusion("bad", "failed")
    assert conclude("resumable", [], []) == Conclusion("warning", "stopped")
    assert conclude("completed", [], []) == Conclusion("note", "nothing was compared")


@pytest.mark.parametrize(
    ("intervals", "begun", "level"),
    [
        ([(0.1, 0.2), (0.1, 0.2)], "better", "good"),
        ([(0.1, 0.2), (-0.2, -0.1)], "worse", "bad"),
        ([(0.1, 0.2), (-0.1, 0.1)], "no difference shown", "warning"),
    ],
)
def test_several_evaluations_are_as_good_as_the_worst(
    intervals: list[tuple[float, float]], begun: str, level: str
) -> None:
    for order in (intervals, intervals[::-1]):
        found = conclude("completed", [judged(effect(*each)) for each in order], [])
        assert found.text.startswith(f"{begun}: ") and found.level == level


def test_a_conclusion_of_many_evaluations_stays_short() -> None:
    found = conclude("completed", [judged(effect(0.1, 0.2))] * 9, [])
    assert found.text.count("accuracy") == 3 and found.text.endswith("; and 6 more")


FIRING = Firing(guard=Guard(metric="score_mean", above=2.0), step=7, values=(1.5, 2.5))


def test_over_optimization_is_recognized_in_the_warning_that_is_written() -> None:
    text = score_against_accuracy(evaluation(0.93, -0.029))
    assert text is not None
    [found] = alarms_of("evaluation", remark=None, warnings=("another warning", text), firings=())
    assert (found.step, found.title, found.text) == ("evaluation", "Over-optimisation", text)


def test_remarks_of_the_ledger_are_recognized() -> None:
    trained, other = policy("policy", "the same weights"), policy("policy", "others")
    inputs = {"init": Input(stage="sft", artifact=SFT)}
    [found] = alarms_of("policy", remark=remark_on(trained, inputs), warnings=(), firings=())
    assert found == Alarm("policy", "Learned nothing", "the best weights are those of sft")
    assert alarms_of("policy", remark=remark_on(other, inputs), warnings=(), firings=()) == ()
    sides = {
        "candidate": Input(stage="policy", artifact=trained),
        "baseline": Input(stage="sft", artifact=SFT),
    }
    [itself] = alarms_of("evaluation", remark=remark_on(EVALUATION, sides), warnings=(), firings=())
    assert itself.title == "Compared with itself" and itself.text.startswith(
        "policy holds the weights of sft"
    )


def test_a_guard_that_fired_is_an_alarm_once() -> None:
    found = alarms_of("policy", remark=None, warnings=(), firings=(FIRING, FIRING))
    assert [each.title for each in found] == ["A guard fired"]
    assert "fired after step 7" in found[0].text
